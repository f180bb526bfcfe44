"""People's labels and the evidence they are about -> surface pictures for the nano model.

The pictures are those that the model was given, to the bit, both looks. An OK is a clean surface
in both. An NG with a class is that class; its grid is learned only where somebody drew the cells,
and the second look only where a drawn cell lies in its windows. Blind labels only, settled as
`contract.label.settle` says; a label about other pictures than the evidence holds is refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import record, tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.error import ContractError
from forge_station.contract.grid import SIDE, DefectGrid
from forge_station.contract.label import Label, settle
from forge_station.contract.record import Limit
from forge_station.contract.verdict import Outcome
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from training.data import shards
from training.data.loaders import evidence
from training.data.loaders.documents import read_json
from training.data.loaders.evidence import Evidence
from training.data.loaders.sample import LoadError, Picture, Problems, inside
from training.loop.error import LineError

POOL, CLASSES = "surface-labels", "surface-classes"
"""Pools of labelled pictures: with their grid, and with their class alone (SFT only)."""
_PART = {model.id: number for number, model in enumerate(CATALOGUE)}
_Corner = Annotated[int, Limit(0, SIDE // 2)]
_SHADE, _RELIEF, _DIFFERENCE, _STORED = 0, 1, 3, 5


@dataclass(frozen=True)
class Told:
    """One settled label with its evidence. `file`: the verdict."""

    label: Label
    seen: Evidence
    file: Path

    @property
    def part(self) -> str:
        """The physical part: its serial number, or the inspection where nobody knows it."""
        verdict = self.seen.verdict
        return verdict.serial if verdict.serial_source != "none" else verdict.result_id

    @property
    def origin(self) -> str:
        """How the part was chosen, see docs/QUALITY.md; "": a PASS whose label does not say."""
        stopped = self.seen.verdict.outcome in (Outcome.FAIL, Outcome.UNSURE)
        return str(self.label.more.get("origin") or ("harvested" if stopped else ""))


@dataclass(frozen=True)
class Labels:
    """What counts of some labels files, and how many words about parts do not, by reason."""

    told: tuple[Told, ...]
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class _Near:
    """A second look. `windows`: view -> upper left cell."""

    mark: str
    file: str
    windows: Mapping[str, tuple[_Corner, _Corner]]


@dataclass
class _Shard:
    images: list[NDArray[np.uint8]]
    rows: list[dict[str, Any]]


def read(folder: Path, files: Sequence[Path]) -> Labels:
    """Settled labels with their evidence. LineError when none counts, LoadError for bad lines."""
    problems = Problems()
    found = [
        label
        for path in files
        for label in evidence.read_labels(path, tasks.DEFECT_CLASSES, problems)
    ]
    gold = [label for label in found if label.more.get("gold")]
    settled, counted = settle([label for label in found if not label.more.get("gold")])
    counted["gold, whose answer was known"] = len(gold)
    problems.finish()
    places = evidence.index_of(folder, {label.result_id for label, _ in settled}, problems)
    told = []
    for label, _ in settled:
        file = places.get(label.result_id)
        if file is None:
            counted["no evidence of it"] += 1
            continue
        with problems.of(f"result {label.result_id}"):
            seen = evidence.read_evidence(file)
            judged_by = "" if seen.verdict.model is None else seen.verdict.model.sha256
            if label.more.get("bundleDigest", judged_by) != judged_by:
                counted["given to another bundle's pictures"] += 1
                continue
            told.append(Told(label, seen, file))
    problems.finish()
    left_out = {name: count for name, count in counted.items() if count}
    if not told:
        raise LineError(
            "no label counts",
            which=", ".join(map(str, files)),
            expected="blind labels, OK or NG, of parts whose evidence is there, on which people "
            "agree",
            got=", ".join(f"{count} {name}" for name, count in left_out.items()) or "none at all",
            action="label parts blind (docs/QUALITY.md), or let a second person adjudicate",
        )
    return Labels(tuple(told), left_out)


def held_back(part: str, share: float) -> bool:
    """Whether a part is kept from training to choose limits with; by its name, so for good."""
    return int(hashlib.sha256(part.encode()).hexdigest()[:8], 16) / 2**32 < share


def write(told: Sequence[Told], data: Path) -> dict[str, int]:
    """The pools of labelled pictures in a data folder; how many of which. LineError: nothing."""
    pools = {POOL: _Shard([], []), CLASSES: _Shard([], [])}
    counted: Counter[str] = Counter(parts=len({one.part for one in told}))
    for one in told:
        before = sum(len(shard.rows) for shard in pools.values())
        for mark in _marks(one):
            _add(pools, one, mark)
        kind = "OK" if one.label.label == "OK" else "NG"
        if sum(len(shard.rows) for shard in pools.values()) > before:
            counted[kind] += 1
        else:
            counted["without a surface to learn from"] += 1
    if not any(shard.rows for shard in pools.values()):
        raise LineError(
            "no label says anything of a surface",
            expected="OK, or NG with its defect, of parts whose surface was inspected",
            got=f"{len(told)} labels",
            action="name the defect of an NG, and draw its cells",
        )
    for name, shard in pools.items():
        if shard.rows:
            meta = {key: np.array([row[key] for row in shard.rows]) for key in shard.rows[0]}
            shards.write_shard(data / name, 0, np.stack(shard.images), meta)
        counted[name] = len(shard.rows)
    return dict(counted)


def _marks(one: Told) -> list[str]:
    """The surfaces that a label is about. LoadError: a defect of which part."""
    marks = list(one.seen.surfaces)
    if one.label.mark is not None:
        return [mark for mark in marks if mark == one.label.mark]
    if one.label.label == "NG" and (one.label.defect is None or len(marks) != 1):
        return []
    return marks


def _add(pools: Mapping[str, _Shard], one: Told, mark: str) -> None:
    picture, _ = one.seen.surfaces[mark]
    label = one.label
    read = next((part for part in one.seen.verdict.parts if part.mark == mark), None)
    if read is None:
        raise LoadError("a surface of a part that the verdict does not name", which=one.file,
                        expected="its mark among parts", got=mark)  # fmt: skip
    named = (label.readings or {}).get(mark, read.part)
    if named not in _PART or (label.label == "NG" and label.defect is None):
        return
    grid = np.zeros((len(VIEWS), SIDE, SIDE), np.bool_)
    for view, cells in (label.cells or {}).items():
        grid[VIEWS.index(view)] = DefectGrid.of(cells).cells
    share = grid.sum() / max(1, evidence.filled_cells(picture))
    row = {
        "part": np.int16(_PART[named]),
        "size": np.asarray(read.size_mm, np.float32),
        "defect": np.uint8(tasks.SURFACE_CLASSES.index(label.defect or tasks.NORMAL)),
        "grid": grid,
        "score": np.int8(tasks.surface_score(min(1.0, float(share)))),
        "closer": False,
        "labelled": True,
        "unmarked": label.label == "NG" and not grid.any(),
    }
    shard = pools[CLASSES if row["unmarked"] else POOL]
    shard.images.append(_stored(picture))
    shard.rows.append(row)
    for near, windows in _closer(one.file, mark):
        seen = _within(grid, windows)
        if label.label == "OK" or seen.sum() >= 2:
            shard.images.append(_stored(near))
            shard.rows.append({**row, "grid": seen, "closer": True})


def _stored(picture: Picture) -> NDArray[np.uint8]:
    """As pools keep it, [H, W, 5]: the station keeps no height and no white image of a surface."""
    seen = np.asarray(picture.decoded().convert("RGB"))
    expected = NANO_LAYOUT.surface_size
    if seen.shape[:2] != expected:
        raise LoadError(
            "surface picture of another layout", which=picture.name, expected=expected,
            got=seen.shape[:2], action="labels of a station with a nano bundle train a nano",
        )  # fmt: skip
    out = np.zeros((*expected, _STORED), np.uint8)
    out[..., [_SHADE, _RELIEF, _DIFFERENCE]] = seen
    return out


def _closer(file: Path, mark: str) -> list[tuple[Picture, Mapping[str, Sequence[int]]]]:
    """The second look at a mark, if there was one: picture, and view -> upper left cell."""
    path = file.with_name(file.name.replace(".verdict.json", ".input.json"))
    listed = read_json(path)
    looks = listed.get("closer", []) if isinstance(listed, dict) else []
    try:
        found = [
            record.read(_Near, {name: item[name] for name in ("mark", "file", "windows")})
            for item in looks
        ]
        if any(set(near.windows) != set(VIEWS) for near in found):
            raise KeyError("windows")
    except (KeyError, TypeError, ContractError) as error:
        raise LoadError(
            "second looks cannot be read", which=f"{path}: closer", got=error,
            expected="mark, file and windows of each",
        ) from error  # fmt: skip
    return [
        (Picture(inside(path.parent, near.file, f"{path.name}: closer")), near.windows)
        for near in found
        if near.mark == mark
    ]


def _within(grid: NDArray[np.bool_], windows: Mapping[str, Sequence[int]]) -> NDArray[np.bool_]:
    """Cells as the second look shows them: a window of half the side, at twice the scale."""
    out = np.zeros_like(grid)
    half = SIDE // 2
    for number, view in enumerate(VIEWS):
        row, column = windows[view]
        part = grid[number, row : row + half, column : column + half]
        out[number] = np.kron(part, np.ones((2, 2), np.bool_))
    return out
