"""A case: all that entered the decision about a part after decoding, as one npz without loss.

    case        JSON: job with its product, scan, problems of the gate, how the inspector was set
    0.points    of each part [3, 4, N] uint8: bits of the float32 coordinates, point by point as
                the difference from the one before, sorted into byte planes (zlib then halves them)
    0.pose, 0.footprint, 0.white        see `geometry.pose.PartCloud`

With the bundle that it names, a case gives its verdict again, bit for bit (`rejudge`).
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station import version
from forge_station.capture.fusion import Fusion
from forge_station.checks import Thresholds
from forge_station.contract import record
from forge_station.contract.certificate import Certificate
from forge_station.contract.error import ContractError
from forge_station.contract.record import NotNegative
from forge_station.contract.verdict import ScanSummary
from forge_station.errors import InputError
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.permit import Permit
from forge_station.pipeline import Gates, Inspection, Inspector, Job
from forge_station.vlm.grid_readout import Readout

SCHEMA = "forge-station.case/1.0"
_MAX_BYTES = 4 << 30
_SCALARS = ("touches_border", "camera_pixel_mm", "poses", "unseen_share", "has_waist")


@dataclass(frozen=True)
class Decider:
    """How the inspector was set that judged the part, and by which bundle and certificate."""

    bundle: str
    """Digest of the manifest, as the verdict has it."""
    name: str
    version: str
    provider: str
    threads: int
    thresholds: Thresholds
    time_budget_s: NotNegative
    grid: Readout
    fusion: Fusion
    gates: Gates
    certificate: Certificate | None
    refusal: str
    """Why there was no certificate."""
    model_sha256: str
    changed: tuple[str, ...] = ()
    withheld: str | None = None
    """Why PASS was withheld though the certificate held."""

    @classmethod
    def of(cls, inspector: Inspector, threads: int) -> Decider:
        manifest, permit = inspector.model.manifest, inspector.permit
        return cls(
            bundle=manifest.sha256,
            name=manifest.name,
            version=manifest.version,
            provider=inspector.model.provider,
            threads=threads,
            thresholds=inspector.thresholds,
            time_budget_s=inspector.time_budget_s,
            grid=inspector.grid,
            fusion=inspector.fusion,
            gates=inspector.gates,
            certificate=permit.certificate,
            refusal=permit.refusal,
            model_sha256=permit.model_sha256,
            changed=permit.changed,
            withheld=permit.withheld,
        )

    def permit_at(self, time: str) -> Permit:
        """The permit as it was at an RFC 3339 time."""
        moment = _moment(time)
        return Permit(
            self.certificate,
            self.refusal,
            model_sha256=self.model_sha256,
            changed=self.changed,
            withheld=self.withheld,
            clock=lambda: moment,
        )

    def set(self, inspector: Inspector, time: str, budget_s: float) -> Inspector:
        """The inspector of the same bundle, set as this one was; its model may take `budget_s`."""
        return replace(
            inspector,
            thresholds=self.thresholds,
            grid=self.grid,
            fusion=self.fusion,
            gates=self.gates,
            permit=self.permit_at(time),
            time_budget_s=budget_s,
        )


@dataclass(frozen=True)
class _PartFacts:
    touches_border: bool
    camera_pixel_mm: float
    poses: int
    unseen_share: float
    has_waist: bool


@dataclass(frozen=True)
class _Facts:
    """The JSON of a case."""

    schema: str
    software: str
    job: Job
    scan: ScanSummary
    problems: tuple[Problem, ...]
    parts: tuple[_PartFacts, ...]
    decider: Decider


@dataclass(frozen=True)
class Case:
    """One part as it was judged."""

    job: Job
    scan: ScanSummary
    problems: tuple[Problem, ...]
    parts: tuple[PartCloud, ...]
    decider: Decider
    software: str = ""
    """Version of the station that judged."""

    @classmethod
    def of(cls, job: Job, found: Inspection, decider: Decider) -> Case:
        """`job` is the one that gave the inspection; `decider` the inspector that made it."""
        return cls(job, found.verdict.scan, found.problems, found.parts, decider, version())

    def to_bytes(self) -> bytes:
        """The file. Raises ValueError for a figure that is NaN."""
        parts = tuple(
            _PartFacts(*(getattr(part, name) for name in _SCALARS)) for part in self.parts
        )
        facts = _Facts(
            SCHEMA, self.software, self.job, self.scan, self.problems, parts, self.decider
        )
        text = json.dumps(record.write(facts), ensure_ascii=False, allow_nan=False)
        arrays: dict[str, NDArray[Any]] = {"case": np.frombuffer(text.encode(), np.uint8)}
        for number, part in enumerate(self.parts):
            arrays[f"{number}.points"] = pack(part.points)
            arrays[f"{number}.pose"] = part.tray_from_part
            arrays[f"{number}.footprint"] = part.footprint
            if part.white is not None:
                arrays[f"{number}.white"] = part.white
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, which: object) -> Case:
        """Raises InputError naming `which` for anything that is no whole case."""
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(item.file_size for item in archive.infolist())
            if size > _MAX_BYTES:
                raise InputError("case too large", which=which, expected=_MAX_BYTES, got=size)
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                facts = record.read(_Facts, json.loads(arrays["case"].tobytes()))
                if facts.schema.rsplit(".", 1)[0] != SCHEMA.rsplit(".", 1)[0]:
                    raise InputError(
                        "case of another schema", which=which, expected=SCHEMA, got=facts.schema
                    )
                parts = tuple(_part(arrays, k, item) for k, item in enumerate(facts.parts))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(
                "not a whole case", which=which, expected="a file .case.npz of a station", got=error
            ) from error
        except ContractError as error:
            raise InputError("not a case", which=which, got=error) from error
        return cls(facts.job, facts.scan, facts.problems, parts, facts.decider, facts.software)


def _part(arrays: Any, number: int, facts: _PartFacts) -> PartCloud:
    white = f"{number}.white"
    return PartCloud(
        points=unpack(arrays[f"{number}.points"]),
        tray_from_part=_checked(arrays[f"{number}.pose"], (4, 4), np.float64),
        footprint=_checked(arrays[f"{number}.footprint"], (4, 2), np.float32),
        white=arrays.get(white),
        **{name: getattr(facts, name) for name in _SCALARS},
    )


def _checked(found: NDArray[Any], shape: tuple[int, ...], kind: type) -> NDArray[Any]:
    if found.shape != shape or found.dtype != kind:
        raise ValueError(f"{found.dtype} {found.shape} where {kind.__name__} {shape} belongs")
    return found


def pack(points: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [N, 3] -> uint8 [3, 4, N], see above. `unpack` gives back the same bits."""
    bits = np.ascontiguousarray(points, "<f4").view("<u4")
    steps = bits.copy()
    steps[1:] -= bits[:-1]
    planes = np.ascontiguousarray(steps.T).view(np.uint8).reshape(3, -1, 4)
    return np.ascontiguousarray(planes.transpose(0, 2, 1))


def unpack(planes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [3, 4, N] -> float32 [N, 3]. Raises ValueError for other shapes."""
    if planes.dtype != np.uint8 or planes.ndim != 3 or planes.shape[:2] != (3, 4):
        raise ValueError(f"points are {planes.dtype} {planes.shape}")
    steps = np.ascontiguousarray(planes.transpose(0, 2, 1)).reshape(3, -1).view("<u4").T
    bits = np.cumsum(steps, axis=0, dtype=np.uint32)
    return np.ascontiguousarray(bits).view(np.float32)


def _moment(time: str) -> datetime:
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        return datetime.now(timezone.utc)


__all__: Sequence[str] = ("SCHEMA", "Case", "Decider", "pack", "unpack")
