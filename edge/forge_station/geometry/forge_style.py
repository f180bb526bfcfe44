"""The three-view picture as FORGE published it, for comparison with the paper. Not for inspection.

Its views are unlike the station's: front is x right y up, side y right z up, top x right z up;
every panel has its own scale, nothing hides anything, and letters may sit on parts.

Layout measured on the published figure: 2810 x 1077 px, three panels of 926 x 931 px inside a
5 px black frame, 9 px apart, captions below, the third panel cut by 26 px at the right. The
figure's numbers add up to a left margin of 10 px; they exceed its height by 1 px, taken from the
caption strip. Point size and letter size are not published and were matched by eye. The published
captions are serif; OpenCV 5 draws its serif font name without serifs.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.floating]
ByteImage = NDArray[np.uint8]
Colour = tuple[int, int, int]

SIZE = (1077, 2810)
PANEL = (931, 926)
_FRAME, _GAP, _LEFT = 5, 9, 10
_CAPTIONS = ("Front View", "Side View", "Top View")
_AXES = ((0, 1), (1, 2), (0, 2))
# matplotlib leaves 5 % of the data range free on each side.
_SPAN = 1.1
_POINT_PX = 5
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BLUE: Colour = (0, 0, 255)
_RED: Colour = (255, 0, 0)

# matplotlib's tab20.
_TAB20 = (
    0x1F77B4, 0xAEC7E8, 0xFF7F0E, 0xFFBB78, 0x2CA02C, 0x98DF8A, 0xD62728, 0xFF9896, 0x9467BD,
    0xC5B0D5, 0x8C564B, 0xC49C94, 0xE377C2, 0xF7B6D2, 0x7F7F7F, 0xC7C7C7, 0xBCBD22, 0xDBDB8D,
    0x17BECF, 0x9EDAE5,
)  # fmt: skip


def colours(count: int) -> list[Colour]:
    """tab20 sampled by linspace(0, 1, count), as matplotlib maps it: index floor(20 x), 19 last."""
    picked = [_TAB20[min(19, int(20 * x))] for x in np.linspace(0.0, 1.0, count)]
    return [(c >> 16, c >> 8 & 255, c & 255) for c in picked]


def composite(parts: Sequence[Points]) -> ByteImage:
    """WORKVERI / ASSYVERI picture: parts [N, 3] in one frame, lettered A, B, ... in their order.

    Returns RGB uint8 [1077, 2810, 3]. Later parts are drawn over earlier ones, whatever is nearer.
    Raises ValueError for no part, more than 26, or a part without points.
    """
    _check(parts)
    if len(parts) > len(_LETTERS):
        raise ValueError(f"FORGE picture: at most {len(_LETTERS)} parts, got {len(parts)}")
    return _compose(parts, colours(len(parts)), _LETTERS[: len(parts)])


def surface(points: Points, defect: NDArray[np.bool_] | None = None) -> ByteImage:
    """SURFINSP picture: one object in pure blue, no letter.

    `defect` [N] paints those points red, as in the published annotations (never in a prompt).
    """
    if defect is None:
        _check([points])
        return _compose([points], [_BLUE], "")
    if defect.shape != (len(points),):
        raise ValueError(f"defect: expected shape ({len(points)},), got {defect.shape}")
    _check([points])
    return _compose([points, points[defect]], [_BLUE, _RED], "")


def _check(parts: Sequence[Points]) -> None:
    if not parts:
        raise ValueError("FORGE picture: expected at least one part, got none")
    for index, points in enumerate(parts):
        if points.ndim != 2 or points.shape[1] != 3 or len(points) == 0:
            raise ValueError(
                f"FORGE picture: part {index} must be [N, 3] with N > 0, got {points.shape}"
            )


def _compose(parts: Sequence[Points], palette: Sequence[Colour], letters: str) -> ByteImage:
    height, width = SIZE
    pitch = PANEL[1] + 2 * _FRAME + _GAP
    image = np.full((height, _LEFT + 3 * pitch, 3), 255, np.uint8)
    for index, (axes, caption) in enumerate(zip(_AXES, _CAPTIONS, strict=True)):
        left = _LEFT + index * pitch
        bottom = PANEL[0] + 2 * _FRAME
        image[:bottom, left : left + PANEL[1] + 2 * _FRAME] = 0
        inner = image[_FRAME : _FRAME + PANEL[0], left + _FRAME : left + _FRAME + PANEL[1]]
        inner[:] = _panel([points[:, axes] for points in parts], palette, letters)
        _caption(image, caption, left + _FRAME + PANEL[1] // 2, bottom)
    return np.ascontiguousarray(image[:, :width])


def _panel(parts: Sequence[Points], palette: Sequence[Colour], letters: str) -> ByteImage:
    rows, columns = PANEL
    image = np.full((rows, columns, 3), 255, np.uint8)
    everything = np.concatenate(parts).astype(np.float64)
    low, high = everything.min(axis=0), everything.max(axis=0)
    extent = np.maximum(high - low, 1e-9)
    scale = min(columns / (_SPAN * extent[0]), rows / (_SPAN * extent[1]))
    centre = (low + high) / 2
    brush = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (_POINT_PX, _POINT_PX))
    anchors = []
    for points, colour in zip(parts, palette, strict=True):
        if len(points) == 0:
            continue
        column = np.floor(columns / 2 + (points[:, 0] - centre[0]) * scale).astype(np.int64)
        row = np.floor(rows / 2 - (points[:, 1] - centre[1]) * scale).astype(np.int64)
        drawn = np.zeros((rows, columns), np.uint8)
        drawn[np.clip(row, 0, rows - 1), np.clip(column, 0, columns - 1)] = 1
        image[cv2.dilate(drawn, brush) > 0] = colour
        anchors.append((int(np.rint(column.mean())), int(np.rint(row.mean()))))
    for letter, anchor in zip(letters, anchors, strict=False):
        _letter(image, letter, anchor)
    return image


def _letter(image: ByteImage, letter: str, anchor: tuple[int, int]) -> None:
    """Black bold letter in a white rounded box of 80 % opacity, centred on `anchor` (x, y)."""
    font, size, weight = cv2.FONT_HERSHEY_DUPLEX, 1.2, 1
    (width, height), _ = cv2.getTextSize(letter, font, size, weight)
    pad, radius = 10, 8
    x0, x1 = anchor[0] - width // 2 - pad, anchor[0] + width // 2 + pad
    y0, y1 = anchor[1] - height // 2 - pad, anchor[1] + height // 2 + pad
    box = np.zeros(image.shape[:2], np.uint8)
    cv2.rectangle(box, (x0 + radius, y0), (x1 - radius, y1), 1, cv2.FILLED)
    cv2.rectangle(box, (x0, y0 + radius), (x1, y1 - radius), 1, cv2.FILLED)
    for x in (x0 + radius, x1 - radius):
        for y in (y0 + radius, y1 - radius):
            cv2.circle(box, (x, y), radius, 1, cv2.FILLED)
    inside = box > 0
    mixed = 0.2 * image[inside].astype(np.float64) + 0.8 * 255.0
    image[inside] = np.rint(mixed).astype(np.uint8)
    origin = (anchor[0] - width // 2, anchor[1] + height // 2)
    cv2.putText(image, letter, origin, font, size, (0, 0, 0), weight, cv2.LINE_AA)


def _caption(image: ByteImage, text: str, centre_x: int, top: int) -> None:
    font, size, weight = cv2.FONT_HERSHEY_COMPLEX, 2.4, 1
    (width, height), _ = cv2.getTextSize(text, font, size, weight)
    origin = (centre_x - width // 2, (top + SIZE[0] + height) // 2)
    cv2.putText(image, text, origin, font, size, (0, 0, 0), weight, cv2.LINE_AA)
