"""Do two splits or two files share pictures or groups? Exact and perceptual hashes.

Exact: SHA-256 of the decoded pixels, so a copied or losslessly re-encoded picture is found.
Perceptual: dHash of 256 bits (16 x 16 signs of horizontal grey steps); up to `BITS` of them may
differ. Measured on two real sets (200 tiles, 100 photos of one fixture): JPEG quality 60 changes at
most 7 bits, half size 6, a crop of 2 % about 15 to 25 (95 %: 35); two different photos of the
fixture differ by 28 or more. A pHash of the same length has 28 to 40 after that crop and 22 between
different photos of the fixture, so it cannot tell them apart. Own ten lines because the usual
library brings SciPy and wavelets for this one function.

Pictures with next to no contrast have no perceptual hash: all of them would match.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from training.data import examples
from training.data.loaders.sample import LoadError, Picture

BITS = 24
"""Differing bits of 256 up to which two pictures count as one."""
_SIDE = 16
_FLAT = 2.0
_BLOCK = 1024


@dataclass(frozen=True)
class Print:
    """Fingerprint of an example's picture. `perceptual`: uint64 [4], None for a flat picture."""

    id: str
    side: str
    """File and split: what must not share anything with another side."""
    group: str
    exact: str
    perceptual: NDArray[np.uint64] | None


@dataclass(frozen=True)
class Leak:
    """Two examples of different sides that share something; `bits` differ of 256."""

    kind: Literal["same pixels", "same picture", "same group"]
    first: str
    second: str
    sides: tuple[str, str]
    bits: int = 0

    def __str__(self) -> str:
        how = (
            f" ({self.bits} of {_SIDE * _SIDE} bits differ)" if self.kind == "same picture" else ""
        )
        return f"{self.kind}: {self.first} [{self.sides[0]}] = {self.second} [{self.sides[1]}]{how}"


def exact_hash(image: Image.Image) -> str:
    """SHA-256 of size, mode and pixels; grey and RGB of equal grey values are one."""
    pixels = np.asarray(image.convert("RGB"))
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()


def perceptual_hash(image: Image.Image) -> NDArray[np.uint64] | None:
    """dHash, uint64 [4]; None when the picture is flat (grey deviation under 2 of 255)."""
    grey = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.LANCZOS)
    values = np.asarray(grey, np.int16)
    if values.std() < _FLAT:
        return None
    return np.packbits(values[:, 1:] > values[:, :-1]).view(np.uint64)


def fingerprint(image: Image.Image, id: str, side: str = "", group: str = "") -> Print:
    return Print(id, side, group, exact_hash(image), perceptual_hash(image))


def prints_of(paths: Sequence[Path], quiet: bool = False) -> list[Print]:
    """Fingerprints of the judged (last) picture of every example of the files."""
    out = []
    names = {path: path.parent.name if path.name == examples.FILE else path.stem for path in paths}
    if len(set(names.values())) < len(paths):
        names = {path: str(path) for path in paths}
    for path in paths:
        for example in tqdm(
            examples.read(path), desc=f"hash {names[path]}", unit="picture", disable=quiet
        ):
            side = f"{names[path]}/{example.split}"
            group = f"{example.source}:{example.group}" if example.group else ""
            if not example.images:
                raise LoadError("example without a picture", which=f"{path}: {example.id}")
            picture = Picture(path.parent / example.images[-1])
            out.append(fingerprint(picture.decoded(), example.id, side, group))
    return out


def leaks(prints: Sequence[Print], bits: int = BITS) -> list[Leak]:
    """Everything that two different sides share. Sides are equal for equal `Print.side` only."""
    return _shared(prints, "exact") + _similar(prints, bits) + _shared(prints, "group")


def alike(prints: Sequence[Print], bits: int = BITS) -> list[tuple[int, int]]:
    """Index pairs of equal or similar pictures, whatever their sides."""
    first: dict[str, int] = {}
    pairs = [
        (first[item.exact], index)
        for index, item in enumerate(prints)
        if first.setdefault(item.exact, index) != index
    ]
    return pairs + [(a, b) for a, b, _ in _near(prints, bits)]


def _shared(prints: Sequence[Print], field: Literal["exact", "group"]) -> list[Leak]:
    kind: Literal["same pixels", "same group"] = "same pixels" if field == "exact" else "same group"
    found: dict[str, dict[str, Print]] = defaultdict(dict)
    for item in prints:
        value = getattr(item, field)
        if value:
            found[value].setdefault(item.side, item)
    out = []
    for value, sides in found.items():
        first, *others = sides.values()
        for other in others:
            names = (value, value) if field == "group" else (first.id, other.id)
            out.append(Leak(kind, *names, (first.side, other.side)))
    return out


def _similar(prints: Sequence[Print], bits: int) -> list[Leak]:
    return [
        Leak("same picture", prints[a].id, prints[b].id, (prints[a].side, prints[b].side), distance)
        for a, b, distance in _near(prints, bits)
        if prints[a].side != prints[b].side and prints[a].exact != prints[b].exact
    ]


def _near(prints: Sequence[Print], bits: int) -> list[tuple[int, int, int]]:
    """(a, b, distance) with a < b and at most `bits` differing; blocks keep the memory small."""
    index = np.array([i for i, item in enumerate(prints) if item.perceptual is not None], int)
    if len(index) < 2 or bits < 1:
        return []
    codes = np.stack([item.perceptual for item in prints if item.perceptual is not None])
    out = []
    for start in range(0, len(codes), _BLOCK):
        block = codes[start : start + _BLOCK]
        distance = np.zeros((len(block), len(codes) - start), np.int16)
        for word in range(codes.shape[1]):
            distance += np.bitwise_count(block[:, None, word] ^ codes[None, start:, word])
        for a, b in np.argwhere(distance <= bits):
            if b > a:
                out.append((int(index[start + a]), int(index[start + b]), int(distance[a, b])))
    return out
