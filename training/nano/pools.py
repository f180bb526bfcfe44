"""Sample pools on disk: written in shards by `training.synth`, read memory-mapped by training.

A shard is `NNNN.images.npy` (uint8) and `NNNN.meta.npz`; the meta file is written last, so that a
killed writer leaves no half shard. Pools may grow while they are read. A pool `surface` goes with
those named `surface-...` beside it (`surface-decoded`), but `surface-val`, as one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.views import (
    CHANNELS,
    DIFFERENCE,
    MARKS,
    NANO_LAYOUT,
    SURFACE_CHANNELS,
    VIEWS,
    WHITE,
)
from forge_station.geometry import sheet
from training.data import shards
from training.data.shards import write_shard as write_shard
from training.nano import pack

BLANK = "blank"
_VALIDATION = "-val"
_WORKPIECE_OF = np.array([WORKPIECES.index(model.workpiece) for model in CATALOGUE])


@dataclass(frozen=True)
class _Shards:
    images: list[np.ndarray]
    meta: dict[str, np.ndarray]
    first: np.ndarray

    def __len__(self) -> int:
        return int(self.first[-1])

    def image(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self.first, index, side="right")) - 1
        return np.asarray(self.images[shard][index - self.first[shard]])


def _open(data: Path, name: str) -> _Shards:
    folders = [data / name]
    if not name.endswith(_VALIDATION):
        others = sorted(data.glob(f"{name}-*"))
        folders += [path for path in others if not path.name.endswith(_VALIDATION)]
    found = [(path, number) for path in folders for number in shards.numbers(path)]
    if not found:
        raise SystemExit(
            f"pool {data / name}: no shards found; write it with `python -m training.synth {name}`"
        )
    images = [shards.images_of(*shard) for shard in found]
    metas = [shards.read_meta(*shard) for shard in found]
    first = np.cumsum([0] + [len(i) for i in images])
    # What a pool does not tell, its samples are not: closer looks, closed cracks.
    keys = dict.fromkeys(key for meta in metas for key in meta)
    blank = {key: next(m[key] for m in metas if key in m) for key in keys}
    meta = {
        key: np.concatenate(
            [
                m.get(key, np.zeros((len(i), *like.shape[1:]), like.dtype))
                for m, i in zip(metas, images, strict=True)
            ]
        )
        for key, like in blank.items()
    }
    return _Shards(images, meta, first)


@dataclass(frozen=True)
class SheetBatch:
    """images uint8 [B, H, W, 3]; letters, pieces int64 [B, columns] (see AuxiliaryHeads)."""

    images: torch.Tensor
    packed: pack.Batch
    letters: torch.Tensor
    pieces: torch.Tensor


@dataclass(frozen=True)
class SheetPool:
    """Marks sheets: parts stand in columns 0..n-1; `batch` shuffles letters and columns.

    `kept` are the samples it offers, `parts` the catalogue numbers its text-only readings draw on.
    """

    shards: _Shards
    kept: np.ndarray
    parts: np.ndarray

    @classmethod
    def open(cls, data: Path, name: str, without: Collection[str] = ()) -> SheetPool:
        """`without`: workpieces that training must not see; samples that show one are left out."""
        opened = _open(data, name)
        barred = np.isin(_WORKPIECE_OF, [WORKPIECES.index(name) for name in without])
        part = opened.meta["part"]
        kept = np.flatnonzero(~((part >= 0) & barred[part]).any(axis=1))
        return cls(opened, kept, np.flatnonzero(~barred))

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, index: np.ndarray, rng: np.random.Generator) -> SheetBatch:
        layout, meta = NANO_LAYOUT, self.shards.meta
        height, width = layout.sheet_size
        images = np.zeros((len(index), height, width, 3), np.uint8)
        letters = np.full((len(index), layout.columns), len(MARKS), np.int64)
        pieces = np.full((len(index), layout.columns), -1, np.int64)
        packed = []
        for row, i in enumerate(self.kept[index].tolist()):
            stored = self.shards.image(i)
            count = int(meta["count"][i])
            order, columns = rng.permutation(count), rng.permutation(layout.columns)[:count]
            readings, sizes = {}, {}
            for mark, (source, column) in enumerate(
                zip(order.tolist(), columns.tolist(), strict=True)
            ):
                left = column * layout.cell
                cell = stored[:, source * layout.cell : (source + 1) * layout.cell]
                images[row, :, left : left + layout.cell] = cell
                for view in range(len(VIEWS)):
                    top = view * layout.cell
                    images[row, top : top + layout.strip, left : left + layout.cell] = 0
                    sheet.draw_letter(images[row], MARKS[mark], left, top, layout)
                part = int(meta["part"][i, source])
                size = meta["size"][i, source]
                jitter = rng.normal(0, 0.03 + 0.002 * size)
                letters[row, column], pieces[row, column] = mark, _WORKPIECE_OF[part]
                readings[MARKS[mark]] = pack.PART_IDS[part]
                sizes[MARKS[mark]] = _size(np.maximum(size + jitter, 0.1))
            packed.append(
                pack.pack_sheet(readings, sizes, float(meta["mm_per_px"][i]), (height, width), rng)
            )
        return SheetBatch(
            torch.from_numpy(images),
            pack.collate(packed),
            torch.from_numpy(letters),
            torch.from_numpy(pieces),
        )

    def random_readings(self, count: int, rng: np.random.Generator) -> list[dict[str, str]]:
        """Readings without a picture: half from stored scenes, half drawn from the catalogue."""
        out = []
        meta = self.shards.meta
        for _ in range(count):
            if rng.random() < 0.5:
                i = int(self.kept[rng.integers(len(self))])
                parts = [int(p) for p in meta["part"][i] if p >= 0]
            else:
                kinds = rng.choice(self.parts, int(rng.integers(1, 5)))
                parts = [int(p) for p in rng.choice(kinds, int(rng.integers(2, 7)))]
            rng.shuffle(parts)
            out.append({MARKS[i]: pack.PART_IDS[part] for i, part in enumerate(parts)})
        return out


@dataclass(frozen=True)
class SurfaceBatch:
    """images uint8 [B, H, W, 3]; grid bool [B, 3, 16, 16]; defect int64 [B] (0 = normal); marked
    bool [B]: whether the grid is known."""

    images: torch.Tensor
    packed: pack.Batch
    grid: torch.Tensor
    defect: torch.Tensor
    marked: torch.Tensor


STORED_CHANNELS = (*CHANNELS, DIFFERENCE, WHITE)
"""Channels of a stored surface picture; the model is shown three of them."""
NO_REFERENCE = 0.1
"""Share of training pictures whose difference is blank: parts without a reference."""


@dataclass(frozen=True)
class SurfacePool:
    """Surface pictures with class, score and grid. `channels`: which three the model sees.

    A name may be `blank`: an ablation takes a channel away and leaves all else as it is.
    """

    shards: _Shards
    channels: tuple[str, str, str] = SURFACE_CHANNELS
    no_reference: float = 0.0
    form: pack.GridForm = "rows"
    labelled: float = 0.0
    """Share of what `draw` gives that people labelled, where the pool has such pictures."""

    @classmethod
    def open(
        cls,
        data: Path,
        name: str,
        channels: tuple[str, str, str] | None = None,
        no_reference: float = 0.0,
        form: pack.GridForm = "rows",
        labelled: float = 0.0,
    ) -> SurfacePool:
        """`channels` None: with the difference where the pool has it, else without.

        `form`: how `batch` has the grid written. `labelled`: see the field.
        """
        opened = _open(data, name)
        stored = STORED_CHANNELS[: min(images.shape[-1] for images in opened.images)]
        if channels is None:
            channels = SURFACE_CHANNELS if DIFFERENCE in stored else CHANNELS
        lacking = [c for c in channels if c != BLANK and c not in stored]
        if lacking:
            raise SystemExit(
                f"pool {data / name}: its pictures have {', '.join(stored)}, not "
                f"{', '.join(lacking)}; write it again with `python -m training.synth {name}`"
            )
        return cls(opened, channels, no_reference, form, labelled)

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def closer_looks(self) -> int:
        """How many of the pictures are closer looks."""
        return int(self.shards.meta["closer"].sum()) if "closer" in self.shards.meta else 0

    @property
    def labelled_pictures(self) -> int:
        """How many of the pictures people labelled."""
        return int(self.shards.meta["labelled"].sum()) if "labelled" in self.shards.meta else 0

    def _closer(self, index: int) -> bool:
        return "closer" in self.shards.meta and bool(self.shards.meta["closer"][index])

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Samples for one batch, int [count]; `labelled` of them, on average, people's."""
        index = rng.integers(0, len(self), count)
        own = np.flatnonzero(self.shards.meta.get("labelled", np.zeros(0, bool)))
        if self.labelled > 0 and len(own):
            index = np.where(rng.random(count) < self.labelled, rng.choice(own, count), index)
        return index

    def _unmarked(self, index: int) -> bool:
        """Nobody drew its cells: only the class is known."""
        return "unmarked" in self.shards.meta and bool(self.shards.meta["unmarked"][index])

    def pictures(self, index: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Pictures uint8 [B, H, W, 3] in the pool's channels."""
        stored = [self.shards.image(i) for i in index.tolist()]
        out = np.zeros((len(stored), *stored[0].shape[:2], 3), np.uint8)
        for place, name in enumerate(self.channels):
            if name != BLANK:
                for picture, image in zip(out, stored, strict=True):
                    picture[..., place] = image[..., STORED_CHANNELS.index(name)]
            if name == DIFFERENCE and self.no_reference > 0:
                out[rng.random(len(index)) < self.no_reference, ..., place] = 0
        return out

    def batch(self, index: np.ndarray, rng: np.random.Generator) -> SurfaceBatch:
        meta = self.shards.meta
        images = self.pictures(index, rng)
        packed = []
        for i in index.tolist():
            size = meta["size"][i] * rng.normal(1, 0.005, 3)
            packed.append(
                pack.pack_surface(
                    pack.PART_IDS[int(meta["part"][i])],
                    _size(size),
                    tasks.SURFACE_CLASSES[int(meta["defect"][i])],
                    None if self._unmarked(i) else meta["grid"][i],
                    None if self._closer(i) or self._unmarked(i) else int(meta["score"][i]),
                    NANO_LAYOUT.surface_size,
                    rng,
                    self.form,
                )
            )
        return SurfaceBatch(
            torch.from_numpy(images),
            pack.collate(packed),
            torch.from_numpy(meta["grid"][index]),
            torch.from_numpy(meta["defect"][index].astype(np.int64)),
            torch.tensor([not self._unmarked(i) for i in index.tolist()]),
        )


def _size(values: np.ndarray) -> tuple[float, float, float]:
    return float(values[0]), float(values[1]), float(values[2])
