"""A pool of samples on disk, in shards: written whole or not at all, counted, checked.

A shard is `NNNNN.images.npy` (uint8 [N, ...]) and `NNNNN.meta.npz` (arrays of N rows). Both appear
by rename, the meta file last: a shard whose meta file is there is whole. No torch, no scenes.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Meta = Mapping[str, NDArray[np.generic]]
META, IMAGES = ".meta.npz", ".images.npy"


def write_shard(folder: Path, number: int, images: NDArray[np.uint8], meta: Meta) -> None:
    """Write one shard; a writer that is killed leaves `.partial` files only."""
    folder.mkdir(parents=True, exist_ok=True)
    # A name of its own, so that two writers of one shard (a retry on a cluster) do not mix.
    partial = folder / f"{number:05d}.{os.getpid()}.partial"
    try:
        for ending in (IMAGES, META):
            with partial.open("wb") as file:
                if ending == IMAGES:
                    np.save(file, images)
                else:
                    np.savez(file, **meta)  # type: ignore[arg-type]
            partial.replace(folder / f"{number:05d}{ending}")
    finally:
        partial.unlink(missing_ok=True)


def numbers(folder: Path) -> list[int]:
    """Numbers of the whole shards, in order."""
    return sorted(int(path.name.removesuffix(META)) for path in folder.glob(f"[0-9]*{META}"))


def without_partials(folder: Path) -> int:
    """Remove what killed writers left; returns how many files. No writer may be at work."""
    left = list(folder.glob("[0-9]*.partial"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def read_meta(folder: Path, number: int) -> dict[str, NDArray[np.generic]]:
    # Opened here: numpy leaves the file of a broken archive open.
    with (folder / f"{number:05d}{META}").open("rb") as file, np.load(file) as stored:
        return {key: stored[key] for key in stored.files}


def images_of(folder: Path, number: int) -> NDArray[np.uint8]:
    """Memory-mapped images of one shard."""
    return np.load(folder / f"{number:05d}{IMAGES}", mmap_mode="r")


def faults(folder: Path, number: int) -> Iterator[str]:
    """What is wrong with a shard: unreadable files, lengths, empty images, values not finite."""
    try:
        images, meta = images_of(folder, number), read_meta(folder, number)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        yield f"cannot be read: {type(error).__name__}: {error}"
        return
    for key, values in meta.items():
        if len(values) != len(images):
            yield f"{key}: {len(values)} rows for {len(images)} images"
        elif np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
            yield f"{key}: not finite in samples {_some(rows)}"
    empty = [i for i, image in enumerate(images) if not image[..., 0].any()]
    if empty:
        yield f"images without content: samples {_some(np.array(empty))}"


def _some(rows: NDArray[np.integer]) -> str:
    listed = ", ".join(map(str, rows[:5].tolist()))
    return listed + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
