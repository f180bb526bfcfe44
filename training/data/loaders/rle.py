"""COCO run-length masks -> arrays, from untrusted JSON.

Runs of 0 and 1 in turn, column by column, as a list or as COCO's text: base 48, five bits a
character, and from the fourth run on the difference to the run two before. Own code because the
reference library writes past its buffer for malformed text (an abort of the process, seen with
pycocotools 2.0.11); a test compares the two on masks that are well-formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.data.loaders.sample import LoadError

_LONGEST = 60
"""Bits of one number; a picture has fewer pixels than that can count."""


def decode(segmentation: Any, size: tuple[int, int]) -> NDArray[np.bool_]:
    """`{"size": [h, w], "counts": list or text}` -> bool [h, w]; `size` is that of the picture."""
    own, counts = segmentation.get("size"), segmentation.get("counts")
    if own != list(size):
        raise LoadError("RLE of another size", which="size", expected=list(size), got=own)
    runs = _unpacked(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, Sequence) or not all(type(n) is int and n >= 0 for n in runs):
        raise LoadError("not RLE", which="counts", expected="runs of 0 or more, or COCO's text")
    pixels = size[0] * size[1]
    if sum(runs) != pixels:
        raise LoadError("RLE of another length", which="counts", expected=pixels, got=sum(runs))
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(size[1], size[0]).T.copy()


def _unpacked(text: str) -> list[int]:
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise LoadError("not RLE", which="counts", expected="characters 0 to o", got=character)
        value |= (bits & 0x1F) << shift
        shift += 5
        if shift > _LONGEST:
            raise LoadError(
                "not RLE", which="counts", expected="runs within a picture", got=text[:40]
            )
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise LoadError("not RLE", which="counts", expected="a whole last run", got="a cut text")
    return runs
