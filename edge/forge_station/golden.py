"""The golden set of a bundle: scans with the verdicts that the released model gave on them.

    golden.npz    n.points  float32 [N, 3] mm, tray frame, of scan n
    golden.json   beside each: product, resolution, poses, and what is expected

A station runs it on its own device before a bundle may judge parts: a runtime, a driver or an
accelerator that computes something else is found here and not on the line. `export.bundle --golden`
writes it. The checks decide alone: neither a certificate nor thresholds of a station file count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge_station.capture.base import Cloud
from forge_station.checks import Thresholds
from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import GOLDEN
from forge_station.contract.record import NotNegative
from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import BundleError
from forge_station.permit import CHECKS_ALONE
from forge_station.pipeline import Inspector, Job
from forge_station.vlm.grid_readout import Readout

NOTE, ARRAYS = GOLDEN
SCHEMA = "forge-station.golden/1.0"
MOST_CASES = 1000
Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Expected:
    """What the released model said."""

    outcome: Literal["PASS", "FAIL", "UNSURE", "ERROR"]
    parts: Mapping[str, str] = field(default_factory=dict)
    """Mark -> what was read there."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Mark -> class of the surface."""
    grids: Mapping[str, Cells] = field(default_factory=dict)
    """`mark/view` -> defective cells."""

    @staticmethod
    def of(verdict: Verdict) -> Expected:
        return Expected(
            verdict.outcome.value,
            {item.mark: item.part for item in verdict.parts},
            {item.mark: item.defect_class for item in verdict.surface},
            {f"{grid.mark}/{grid.view}": grid.cells for grid in verdict.grids},
        )


@dataclass(frozen=True)
class GoldenCase:
    """One scan, by its number in the arrays."""

    id: str
    product: Product
    camera_pixel_mm: NotNegative
    expected: Expected
    poses: int = 1


@dataclass(frozen=True)
class Golden:
    """The set without its points. `grid`: how defect grids were read (`runtime.grid`)."""

    cases: tuple[GoldenCase, ...]
    grid: Readout = "rows"
    schema: Literal["forge-station.golden/1.0"] = "forge-station.golden/1.0"

    def __post_init__(self) -> None:
        if not 0 < len(self.cases) <= MOST_CASES:
            raise ContractError(
                "the golden set is not valid", expected=f"1 to {MOST_CASES}", got=len(self.cases)
            )


@dataclass(frozen=True)
class Tolerance:
    """How near a device must come. Verdicts, readings and classes must be equal."""

    grid_iou: float = 0.98
    p99_ms: float = 10_000.0


@dataclass(frozen=True)
class Report:
    """What a run of the set gave."""

    cases: int
    different: tuple[str, ...]
    """`id: what, expected, got` of each case that was judged otherwise."""
    grid_iou: float
    """Mean over all grids; two empty ones agree."""
    p99_ms: float
    tolerance: Tolerance

    @property
    def fault(self) -> str | None:
        """Why the bundle must not judge parts on this device; None: it may."""
        found = []
        if self.different:
            found.append(
                f"{len(self.different)} of {self.cases} golden parts judged otherwise: "
                + "; ".join(self.different[:3])
            )
        if self.grid_iou < self.tolerance.grid_iou:
            found.append(
                f"defect grids agree by {self.grid_iou:.3f}, at least "
                f"{self.tolerance.grid_iou:g} is wanted"
            )
        if self.p99_ms > self.tolerance.p99_ms:
            found.append(f"p99 {self.p99_ms:.0f} ms, at most {self.tolerance.p99_ms:.0f} ms")
        return "; ".join(found) or None


def read(folder: Path) -> tuple[Golden, dict[str, Any]] | None:
    """The golden set of a verified bundle folder with its arrays by name; None without one.

    Raises BundleError.
    """
    if not (folder / NOTE).is_file():
        return None
    try:
        content = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        found = record.read(Golden, content)
        with np.load(folder / ARRAYS, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        for number, case in enumerate(found.cases):
            points = arrays.get(f"{number}.points")
            if points is None or points.ndim != 2 or points.shape[1] != 3 or not len(points):
                raise ValueError(f"no points of case {case.id}")
    except (OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise BundleError("the golden set cannot be read", which=folder / NOTE, got=text) from error
    return found, arrays


def write(
    folder: Path,
    inspector: Inspector,
    scans: Sequence[tuple[str, Product, Cloud]],
    progress: Callable[[int, int], object] = lambda _done, _all: None,
) -> Golden:
    """Judge the scans with the bundle that lies in the folder, and write both files into it.

    A scan that ends in ERROR tests nothing and is refused (BundleError).
    """
    plain = _plain(inspector)
    cases, arrays = [], {}
    for number, (name, product, cloud) in enumerate(scans):
        verdict = plain.inspect_cloud(_job(name, product), cloud).verdict
        if verdict.outcome is Outcome.ERROR:
            raise BundleError(
                "a golden part ends in ERROR",
                which=name,
                got="; ".join(reason.text for reason in verdict.reasons),
                action="take another case: the set must show what the model can",
            )
        arrays[f"{number}.points"] = np.ascontiguousarray(cloud.points, np.float32)
        cases.append(
            GoldenCase(
                name, product, float(cloud.camera_pixel_mm), Expected.of(verdict), cloud.poses
            )
        )
        progress(number + 1, len(scans))
    found = Golden(tuple(cases), plain.grid)
    np.savez_compressed(folder / ARRAYS, **arrays)  # type: ignore[arg-type]
    text = json.dumps(record.write(found), indent=1, sort_keys=True)
    (folder / NOTE).write_text(f"{text}\n", encoding="utf-8")
    return found


def run(
    inspector: Inspector,
    golden: Golden,
    arrays: Mapping[str, Any],
    tolerance: Tolerance,
    progress: Callable[[int, int], object] = lambda _done, _all: None,
) -> Report:
    """Judge the set on this device. The first part is judged twice: the time of a cold start is
    not that of a part."""
    plain = replace(_plain(inspector), grid=golden.grid)
    different, overlaps, spent = [], [], []
    for number, case in enumerate((golden.cases[0], *golden.cases)):
        points = arrays[f"{max(0, number - 1)}.points"]
        cloud = Cloud(points, None, case.camera_pixel_mm, case.poses)
        begun = time.perf_counter()
        verdict = plain.inspect_cloud(_job(case.id, case.product), cloud).verdict
        if number == 0:
            continue
        spent.append((time.perf_counter() - begun) * 1000)
        got = Expected.of(verdict)
        different += _differences(case, got)
        names = case.expected.grids.keys() | got.grids.keys()
        overlaps += [_iou(case.expected.grids.get(k, ()), got.grids.get(k, ())) for k in names]
        progress(number, len(golden.cases))
    iou = float(np.mean(overlaps)) if overlaps else 1.0
    p99 = float(np.percentile(spent, 99))
    return Report(len(golden.cases), tuple(different), iou, p99, tolerance)


def _plain(inspector: Inspector) -> Inspector:
    """With the bundle's own operating points, and no certificate in the way."""
    own = Thresholds.read(inspector.model.manifest.thresholds)
    return replace(inspector, thresholds=own, permit=CHECKS_ALONE)


def _job(name: str, product: Product) -> Job:
    return Job(result_id=name, serial=name, product=product, simulated=True, source="golden")


def _differences(case: GoldenCase, got: Expected) -> list[str]:
    wanted = case.expected
    for what in ("outcome", "parts", "classes"):
        before, now = getattr(wanted, what), getattr(got, what)
        if before != now:
            return [f"{case.id}: {what}, expected {_short(before)}, got {_short(now)}"]
    return []


def _short(value: object) -> str:
    return str(dict(value) if isinstance(value, Mapping) else value)[:80]


def _iou(one: Cells, other: Cells) -> float:
    a, b = set(map(tuple, one)), set(map(tuple, other))
    return len(a & b) / len(a | b) if a | b else 1.0
