"""Gray-code captures of other tools: a folder of images and no word about their order.

What the file names do not say is read from the images: where white and black are, whether each
pattern has its inverse and where, whether columns or rows come first, and whether the first bit is
the coarsest. The result is a stack in this package's order, with what was found in `meta`. Knows
neither how the code is decoded nor models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import PatternStack
from forge_station.capture.calibration import Calibration
from forge_station.errors import InputError

Images = NDArray[np.uint8]
Bool = NDArray[np.bool_]

SUFFIXES = (".png", ".bmp", ".jpg", ".jpeg", ".tif", ".tiff", ".pgm")
_NUMBER = re.compile(r"\d+")
# Every so many pixels are looked at to tell the order.
_STRIDE = 4
_LIT_LEVELS, _LEAST_LIT = 20, 200
# White is brightest and black darkest in this share of the lit pixels; an image and its inverse add
# up to white and black within this share of their contrast.
_CLEAR_SHARE, _INVERSE_SHARE = 0.9, 0.15
_LARGEST = 400


@dataclass(frozen=True)
class Capture:
    """A stack in this package's order, and the calibration with the axes that were captured."""

    stack: PatternStack
    calibration: Calibration


def natural_order(paths: Sequence[Path]) -> list[Path]:
    """By name, numbers by value: img2 before img10."""

    def key(path: Path) -> list[tuple[int, int, str]]:
        pieces = re.split(r"(\d+)", path.name.lower())
        return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces if p]

    return sorted(paths, key=key)


def read_folder(folder: Path, calibration: Calibration, name: str = "") -> Capture:
    """The images of a folder as a stack of inverse pairs.

    Raises InputError naming what is missing, of another size, or cannot be told.
    """
    paths = natural_order([p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES])
    return read(paths, calibration, name or folder.name, folder)


def read(paths: Sequence[Path], calibration: Calibration, name: str, place: Path) -> Capture:
    """Image files in their order; `place` stands in messages."""
    counts = _counts(calibration)
    if not 3 <= len(paths) <= _LARGEST:
        raise InputError(
            "no Gray-code capture",
            which=place,
            expected=f"{' or '.join(map(str, sorted(counts)))} images",
            got=f"{len(paths)} images",
        )
    images = _read_all(paths, calibration)
    thumbs = images[:, ::_STRIDE, ::_STRIDE].astype(np.int16)
    lit = thumbs.max(axis=0) - thumbs.min(axis=0) > _LIT_LEVELS
    if lit.sum() < _LEAST_LIT:
        raise InputError(
            "nothing is lit in the capture",
            which=place,
            got=f"{lit.mean():.1%} of the pixels change by more than {_LIT_LEVELS} grey levels",
            action="check exposure and projector",
        )
    white, black = _white_and_black(thumbs, lit)
    rest = [k for k in range(len(images)) if k not in (white, black)]
    pairing = _pairing(thumbs, lit, rest, white, black)
    bits = pairing.first
    columns, rows = calibration.pattern.column_bits, calibration.pattern.row_bits
    if len(bits) not in {columns + rows, columns}:
        raise InputError(
            "another number of patterns than the code has",
            which=place,
            expected=_expected(columns, rows),
            got=f"{len(bits)} {pairing.told} among {len(images)} images",
            action=_missing(paths) or "check --codes, and that no other images are in the folder",
        )
    values = {k: thumbs[k] > thumbs[m] for k, m in pairing.pairs.items()} or {
        k: 2 * thumbs[k] > thumbs[white] + thumbs[black] for k in bits
    }
    groups, told = _grouped(bits, values, lit, calibration)
    ordered: list[Images] = []
    bright = images[white] if white is not None else images[0]
    dark = images[black] if black is not None else bright
    if white is None or black is None:
        both = images[[*pairing.pairs, *pairing.pairs.values()]]
        bright, dark = both.max(axis=0), both.min(axis=0)
    for group, inverted in groups:
        for k in group:
            pattern = images[k]
            if k in pairing.pairs:
                inverse = images[pairing.pairs[k]]
            else:
                total = bright.astype(np.int16) + dark - pattern
                inverse = np.clip(total, 0, 255).astype(np.uint8)
            ordered += [inverse, pattern] if inverted else [pattern, inverse]
    used = calibration
    if len(groups) == 1 and rows:
        spec = replace(calibration.pattern, axis="column", row_bits=0)
        used = replace(calibration, pattern=spec)
    stack = PatternStack(
        images=np.stack([*ordered, bright, dark])[None],
        exposures=(1.0,),
        pattern=used.pattern,
        calibration_digest=used.digest,
        name=name,
        meta={"source": str(place), "found": f"{len(images)} images, {pairing.told}, {told}"},
    )
    return Capture(stack, used)


def _counts(calibration: Calibration) -> set[int]:
    columns, rows = calibration.pattern.column_bits, calibration.pattern.row_bits
    return {n * pair + 2 for n in {columns + rows, columns} for pair in (1, 2)}


def _expected(columns: int, rows: int) -> str:
    both = f"{columns} column and {rows} row patterns, or the columns alone"
    return both if rows else f"{columns} column patterns"


def _missing(paths: Sequence[Path]) -> str:
    """Which numbers a numbered series lacks."""
    found = [_NUMBER.findall(path.stem) for path in paths]
    if not all(found):
        return ""
    numbers = {int(numbers[-1]) for numbers in found}
    gaps = [k for k in range(min(numbers), max(numbers)) if k not in numbers][:6]
    return f"image {', '.join(map(str, gaps))} is missing: copy it again" if gaps else ""


def _read_all(paths: Sequence[Path], calibration: Calibration) -> Images:
    width, height = calibration.camera.image_size
    read = []
    for path in paths:
        image = _read_image(path)
        if image.shape != (height, width):
            raise InputError(
                "image of another size than the calibration's camera",
                which=path,
                expected=f"{width}x{height}",
                got=f"{image.shape[1]}x{image.shape[0]}",
                action="take the calibration of this camera, and only its images",
            )
        read.append(image)
    # 10 and 12 bit cameras fill the low bits or the high ones; one scale for all images.
    top = max(int(image.max(initial=0)) for image in read)
    shift = np.uint16(max(0, top.bit_length() - 8))
    return np.stack([(image >> shift).astype(np.uint8) for image in read])


def _read_image(path: Path) -> NDArray[np.uint16]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError("image cannot be read", which=path, got=error.strerror) from error
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        image = None
    if image is None or (data.startswith(b"\x89PNG") and not data.endswith(b"IEND\xaeB`\x82")):
        raise InputError(
            "damaged or truncated image",
            which=path,
            got=f"{len(data)} bytes",
            action="copy it again",
        )
    if image.ndim == 3:
        code = cv2.COLOR_BGRA2GRAY if image.shape[2] == 4 else cv2.COLOR_BGR2GRAY
        image = cv2.cvtColor(image, code)
    if image.dtype not in (np.uint8, np.uint16):
        raise InputError("image is neither 8 nor 16 bit", which=path, got=image.dtype)
    return np.asarray(image, np.uint16)


def _white_and_black(thumbs: NDArray[np.int16], lit: Bool) -> tuple[int | None, int | None]:
    """Numbers of the images that are brightest and darkest nearly everywhere, where there are."""
    seen = thumbs[:, lit]
    contrast = seen.max(axis=0) - seen.min(axis=0)
    bright = (seen + contrast // 6 >= seen.max(axis=0)).mean(axis=1)
    dark = (seen - contrast // 6 <= seen.min(axis=0)).mean(axis=1)
    white, black = int(np.argmax(bright)), int(np.argmax(dark))
    return (
        white if bright[white] > _CLEAR_SHARE else None,
        black if dark[black] > _CLEAR_SHARE else None,
    )


@dataclass(frozen=True)
class _Pairing:
    """first: numbers of the patterns in their order; pairs: pattern -> inverse."""

    first: list[int]
    pairs: dict[int, int]
    told: str


def _pairing(
    thumbs: NDArray[np.int16], lit: Bool, rest: list[int], white: int | None, black: int | None
) -> _Pairing:
    """Patterns with inverses next to them, with all inverses behind, or without."""
    half = len(rest) // 2
    seen = thumbs[:, lit]
    low, high = seen.min(axis=0), seen.max(axis=0)
    for told, firsts, seconds in (
        ("patterns with inverses", rest[0::2], rest[1::2]),
        ("patterns, all inverses after them", rest[:half], rest[half:]),
    ):
        if len(firsts) == len(seconds) and all(
            _inverse(seen[a], seen[b], low + high, high - low)
            for a, b in zip(firsts, seconds, strict=True)
        ):
            return _Pairing(firsts, dict(zip(firsts, seconds, strict=True)), told)
    if white is None or black is None:
        lacking = " and ".join(n for n, k in (("white", white), ("black", black)) if k is None)
        raise InputError(
            "neither inverse patterns nor full light and darkness in the capture",
            expected="each pattern with its inverse, or a white and a black image",
            got=f"no {lacking} image, and pairs that do not complement each other",
            action="check that no image is missing, repeated or of another series",
        )
    return _Pairing(rest, {}, "patterns without inverses")


def _inverse(
    one: NDArray[np.int16],
    other: NDArray[np.int16],
    total: NDArray[np.int16],
    contrast: NDArray[np.int16],
) -> bool:
    """Whether two images add up to white and black nearly everywhere; other bits do in half."""
    off = np.abs(one + other - total)
    return bool((off < 4 + _INVERSE_SHARE * contrast).mean() > 0.8)


def _grouped(
    bits: Sequence[int], values: dict[int, Bool], lit: Bool, calibration: Calibration
) -> tuple[list[tuple[list[int], bool]], str]:
    """Column patterns, then row patterns, each coarsest first, and whether they are inverted."""
    columns, rows = calibration.pattern.column_bits, calibration.pattern.row_bits
    turned = calibration.projector_from_camera[:2, :2]
    # The projector's columns run along the image's, unless one of both lies on its side.
    along = 1 if abs(turned[0, 0]) >= abs(turned[0, 1]) else 0
    if len(bits) == columns:
        parts = [list(bits)]
    else:
        first, second = list(bits[:columns]), list(bits[columns:])
        told_first, told_second = list(bits[:rows]), list(bits[rows:])
        straight = _lean(first, values, lit, along) - _lean(second, values, lit, along)
        crossed = _lean(told_second, values, lit, along) - _lean(told_first, values, lit, along)
        parts = [first, second] if straight >= crossed else [told_second, told_first]
    told = []
    groups = []
    for axis, part in enumerate(parts):
        across = along if axis == 0 else 1 - along
        changes = [_changes(values[k], lit, across) for k in part]
        coarse_first = np.polyfit(range(len(part)), changes, 1)[0] >= 0 if len(part) > 1 else True
        ordered = part if coarse_first else part[::-1]
        way = turned[axis, 0] if across == 1 else turned[axis, 1]
        inverted = _falls(values[ordered[0]], lit, across) != (way < 0)
        told.append(
            f"{('columns', 'rows')[axis]} {'coarse' if coarse_first else 'fine'} first"
            f"{', inverted' if inverted else ''}"
        )
        groups.append((ordered, bool(inverted)))
    if len(parts) == 2 and parts[0][0] != bits[0]:
        told.reverse()
    return groups, ", ".join(told)


def _changes(value: Bool, lit: Bool, axis: int) -> float:
    """Share of neighbours along an axis that differ."""
    a, b = (value[:, 1:], value[:, :-1]) if axis == 1 else (value[1:], value[:-1])
    both = lit[:, 1:] & lit[:, :-1] if axis == 1 else lit[1:] & lit[:-1]
    return float((a != b)[both].mean()) if both.any() else 0.0


def _lean(group: Sequence[int], values: dict[int, Bool], lit: Bool, along: int) -> float:
    """How much more the patterns of a group change along the columns' axis than across it."""
    return sum(
        _changes(values[k], lit, along) - _changes(values[k], lit, 1 - along) for k in group
    ) / max(1, len(group))


def _falls(value: Bool, lit: Bool, axis: int) -> bool:
    """Whether the coarsest pattern is bright where the code begins: its inverse came first."""
    place = np.broadcast_to(
        np.arange(value.shape[axis]) if axis == 1 else np.arange(value.shape[0])[:, None],
        value.shape,
    )
    bright, dark = place[lit & value], place[lit & ~value]
    return bool(bright.size and dark.size and bright.mean() < dark.mean())
