"""The picture of a verdict for the person at the line: outcome, reasons, what was seen and read.

It does not know how anything was decided, and makes no file (`encode` gives PNG bytes). An
outcome is a colour, a word and a shape, so that it reads without colours. Letters stand beside
the views, never on a part. All marks share one scale: what looks larger is larger.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.verdict import Outcome
from forge_station.contract.views import VIEWS

ByteImage = NDArray[np.uint8]
Colour = tuple[int, int, int]
Grid = NDArray[np.bool_]

SIZE = (900, 1280)
_HEADER, _FOOTER, _EDGE = 190, 44, 12
_INK: Colour = (26, 26, 26)
_MUTED: Colour = (84, 88, 92)
_PAPER: Colour = (212, 215, 218)
_CARD: Colour = (236, 238, 240)
_DARK: Colour = (22, 26, 30)
_WHITE: Colour = (255, 255, 255)
_FLAG: Colour = (176, 0, 32)
_CELL: Colour = (255, 64, 64)

_BLOCK: Mapping[Outcome, tuple[Colour, Colour, str]] = {
    # Measured: all pairs stay apart for protan, deutan and tritan eyes; text contrast >= 7:1.
    Outcome.PASS: ((159, 211, 182), (0, 0, 0), "the part may go on"),
    Outcome.FAIL: ((176, 0, 32), _WHITE, "take the part out"),
    Outcome.UNSURE: ((255, 196, 0), (0, 0, 0), "a person must look"),
    Outcome.ERROR: ((11, 61, 145), _WHITE, "the station could not decide"),
}


@dataclass(frozen=True)
class MarkPicture:
    """What was seen and read at one mark.

    `views` front, side, top: uint8 [H, W] or [H, W, C] (first channel is shown), 0 = background;
    `mm_per_px` of all three. `grids`: bool [16, 16] a view, row 0 on top, over the whole image.
    `flagged`: the mark is a cause of the outcome. `notes`: short lines under the reading.
    """

    mark: str
    views: Mapping[str, ByteImage]
    mm_per_px: float
    reading: str = ""
    probability: float | None = None
    size_mm: tuple[float, float, float] | None = None
    grids: Mapping[str, Grid] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    flagged: bool = False


@dataclass(frozen=True)
class Title:
    """The header beside the outcome. `details`: short lines such as bundle and time."""

    outcome: Outcome
    serial: str
    line: str = ""
    latency_ms: float | None = None
    details: tuple[str, ...] = ()


def draw(title: Title, reasons: Sequence[str], marks: Sequence[MarkPicture]) -> ByteImage:
    """One RGB picture, uint8 [900, 1280, 3]. `reasons` in order of weight; none for a PASS."""
    height, width = SIZE
    image = np.full((height, width, 3), _PAPER, np.uint8)
    _header(image, title, reasons)
    body = _Box(_EDGE, _HEADER + _EDGE, width - 2 * _EDGE, height - _HEADER - _FOOTER - 2 * _EDGE)
    if marks:
        mm_per_px = _body(image, body, marks)
        _scale_bar(image, mm_per_px, width - _EDGE, height - _FOOTER // 2 - _EDGE // 2)
        _footer(image, marks)
    else:
        _fill(image, body, _CARD)
        _centred(image, "no part to show", body, 1.0, _MUTED)
    return image


def encode(image: ByteImage) -> bytes:
    """PNG bytes of an RGB picture."""
    done, data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not done:
        raise ValueError(f"PNG encoding failed for an image of shape {image.shape}")
    return data.tobytes()


# ---------------------------------------------------------------- layout


@dataclass(frozen=True)
class _Box:
    x: int
    y: int
    width: int
    height: int

    def inset(self, by: int) -> _Box:
        return _Box(self.x + by, self.y + by, self.width - 2 * by, self.height - 2 * by)


def _body(image: ByteImage, body: _Box, marks: Sequence[MarkPicture]) -> float:
    """Draw all marks; returns the common scale, mm per pixel of the picture."""
    cards = _cards(body, len(marks))
    side_by_side = len(marks) <= 2
    cells = [_view_cells(card, side_by_side) for card in cards]
    cell = cells[0][0]
    mm_per_px = max(
        max(shape[0] / cell.height, shape[1] / cell.width)
        for mark in marks
        for shape in [_extent_mm(mark)]
    )
    for mark, card, boxes in zip(marks, cards, cells, strict=True):
        _card(image, card, mark, side_by_side)
        for view, box in zip(VIEWS, boxes, strict=True):
            _view(image, box, mark, view, mm_per_px)
    return mm_per_px


def _cards(body: _Box, count: int) -> list[_Box]:
    if count <= 2:
        height = (body.height - (count - 1) * _EDGE) // count
        return [
            _Box(body.x, body.y + i * (height + _EDGE), body.width, height) for i in range(count)
        ]
    width = (body.width - (count - 1) * _EDGE) // count
    return [_Box(body.x + i * (width + _EDGE), body.y, width, body.height) for i in range(count)]


_SIDE_PANEL = 260
_CARD_TOP, _CARD_BOTTOM = 34, 92


def _view_cells(card: _Box, side_by_side: bool) -> list[_Box]:
    """Boxes of front, side and top in a card."""
    gap = 6
    if side_by_side:
        left = card.x + _SIDE_PANEL
        width = (card.width - _SIDE_PANEL - 3 * gap) // 3
        height = card.height - 2 * gap
        return [_Box(left + i * (width + gap), card.y + gap, width, height) for i in range(3)]
    height = (card.height - _CARD_TOP - _CARD_BOTTOM - 2 * gap) // 3
    return [
        _Box(card.x + gap, card.y + _CARD_TOP + i * (height + gap), card.width - 2 * gap, height)
        for i in range(3)
    ]


def _extent_mm(mark: MarkPicture) -> tuple[float, float]:
    """(height, width) in mm that the views of a mark need: what is filled, or all under a grid."""
    rows, columns = 1e-6, 1e-6
    for view, shown in mark.views.items():
        plane = _grey(shown)
        if view in mark.grids:
            box = (plane.shape[0], plane.shape[1])
        else:
            box = _half_extents(plane)
        rows, columns = max(rows, box[0]), max(columns, box[1])
    return rows * mark.mm_per_px, columns * mark.mm_per_px


def _half_extents(plane: ByteImage) -> tuple[int, int]:
    """Size (rows, columns) of the smallest centred window that holds everything filled."""
    rows, columns = np.nonzero(plane.any(axis=1))[0], np.nonzero(plane.any(axis=0))[0]
    if len(rows) == 0:
        return 1, 1
    tall, wide = plane.shape
    half_rows = max(tall / 2 - rows[0], rows[-1] + 1 - tall / 2)
    half_columns = max(wide / 2 - columns[0], columns[-1] + 1 - wide / 2)
    return int(2 * half_rows) + 4, int(2 * half_columns) + 4


def _grey(shown: ByteImage) -> ByteImage:
    return shown if shown.ndim == 2 else np.ascontiguousarray(shown[..., 0])


# ---------------------------------------------------------------- a mark


def _card(image: ByteImage, card: _Box, mark: MarkPicture, side_by_side: bool) -> None:
    _fill(image, card, _CARD)
    if mark.flagged:
        corner = (card.x + card.width - 1, card.y + card.height - 1)
        cv2.rectangle(image, (card.x, card.y), corner, _FLAG, 4)
    ink = _FLAG if mark.flagged else _INK
    reading = mark.reading or "not read"
    words = reading.split(" ", 1)
    model = words[1] if len(words) > 1 else ""
    if side_by_side:
        x, y, room = card.x + 14, card.y + 52, _SIDE_PANEL - 28
        _badge(image, mark.mark, (x + 20, y - 14), 24, mark.flagged)
        _text(image, model or words[0], (x + 58, y), 1.15, ink, bold=True, room=room - 58)
        if model:
            _text(image, words[0], (x, y + 42), 0.75, ink, room=room)
        y += 78
        y = _probability(image, mark, (x, y), room)
        for line in [*_size_lines(mark), *mark.notes]:
            y += 26
            _text(image, line, (x, y), 0.58, ink if line in mark.notes else _MUTED, room=room)
        return
    _badge(image, mark.mark, (card.x + 20, card.y + 17), 13, mark.flagged)
    room = card.width - 16
    x, y = card.x + 8, card.y + card.height - _CARD_BOTTOM + 14
    _text(image, model or words[0], (card.x + 42, card.y + 25), 0.7, ink, bold=True, room=room - 36)
    y = _probability(image, mark, (x, y - 8), room) + 18
    lines = [words[0] if model else "", *mark.notes, *_size_lines(mark)]
    for line in [line for line in lines if line][:3]:
        _text(image, line, (x, y), 0.5, ink if line in mark.notes else _MUTED, room=room)
        y += 19


def _size_lines(mark: MarkPicture) -> list[str]:
    if mark.size_mm is None:
        return []
    return [" x ".join(f"{value:.1f}" for value in mark.size_mm) + " mm"]


def _probability(image: ByteImage, mark: MarkPicture, at: tuple[int, int], room: int) -> int:
    """Bar and percentage of the reading; returns the lower edge."""
    if mark.probability is None:
        return at[1]
    bar = room - 60
    share = min(1.0, max(0.0, mark.probability))
    cv2.rectangle(image, at, (at[0] + bar, at[1] + 10), _WHITE, cv2.FILLED)
    end = at[0] + round(share * bar)
    cv2.rectangle(image, at, (end, at[1] + 10), _MUTED, cv2.FILLED)
    cv2.rectangle(image, at, (at[0] + bar, at[1] + 10), _INK, 1)
    # 99.96 % must not read as certain.
    text = f"{min(99.9, 100 * share):.0f} %" if share < 0.995 else ">99 %"
    _text(image, text, (at[0] + bar + 8, at[1] + 11), 0.5, _INK)
    return at[1] + 10


def _view(image: ByteImage, box: _Box, mark: MarkPicture, view: str, mm_per_px: float) -> None:
    """One view, scaled to the common scale, centred in its box, with its grid."""
    target = image[box.y : box.y + box.height, box.x : box.x + box.width]
    target[:] = _DARK
    shown = mark.views.get(view)
    if shown is None:
        _text(image, f"{view}: not seen", (box.x + 8, box.y + 20), 0.5, _PAPER)
        return
    plane = _grey(shown)
    factor = mark.mm_per_px / mm_per_px
    # View centre on box centre; pixel centres at half-integers.
    matrix = np.array(
        [
            [factor, 0.0, box.width / 2 - 0.5 - factor * (plane.shape[1] / 2 - 0.5)],
            [0.0, factor, box.height / 2 - 0.5 - factor * (plane.shape[0] / 2 - 0.5)],
        ]
    )
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    source = plane
    if factor < 1:
        # warpAffine has no area filter: blur first, so that thin features do not flicker away.
        source = cv2.GaussianBlur(plane, (0, 0), max(0.01, 0.4 / factor))
        method = cv2.INTER_LINEAR
    size = (box.width, box.height)
    grey = cv2.warpAffine(source, matrix, size, flags=method)
    inside = cv2.warpAffine(
        (plane > 0).astype(np.uint8) * 255, matrix, size, flags=cv2.INTER_LINEAR
    )
    weight = (inside.astype(np.float32) / 255.0)[..., None]
    lit = np.maximum(grey, 1)[..., None].astype(np.float32)
    mixed = weight * lit + (1.0 - weight) * np.array(_DARK, np.float32)
    target[:] = np.rint(mixed).astype(np.uint8)
    if view in mark.grids:
        _grid(target, mark.grids[view], matrix, plane.shape)
    _text(image, view, (box.x + 6, box.y + box.height - 7), 0.45, (150, 156, 162))


def _grid(
    target: ByteImage, grid: Grid, matrix: NDArray[np.float64], shape: tuple[int, ...]
) -> None:
    """Outline the defective cells (shared edges are left out) and tick the cell raster."""
    rows, columns = grid.shape
    x = matrix[0, 2] + matrix[0, 0] * (np.arange(columns + 1) * shape[1] / columns - 0.5)
    y = matrix[1, 2] + matrix[1, 1] * (np.arange(rows + 1) * shape[0] / rows - 0.5)
    xs, ys = np.rint(x).astype(int), np.rint(y).astype(int)
    for value in xs:
        cv2.line(target, (int(value), int(ys[0])), (int(value), int(ys[0]) + 4), (96, 102, 108), 1)
    for value in ys:
        cv2.line(target, (int(xs[0]), int(value)), (int(xs[0]) + 4, int(value)), (96, 102, 108), 1)
    padded = np.pad(grid, 1)
    for colour, thick in ((_DARK, 5), (_CELL, 2)):
        for row, column in np.argwhere(grid):
            left, right = int(xs[column]), int(xs[column + 1])
            upper, lower = int(ys[row]), int(ys[row + 1])
            edges = (
                (padded[row, column + 1], (left, upper), (right, upper)),
                (padded[row + 2, column + 1], (left, lower), (right, lower)),
                (padded[row + 1, column], (left, upper), (left, lower)),
                (padded[row + 1, column + 2], (right, upper), (right, lower)),
            )
            for shared, start, end in edges:
                if not shared:
                    cv2.line(target, start, end, colour, thick)


# ---------------------------------------------------------------- header and footer


def _header(image: ByteImage, title: Title, reasons: Sequence[str]) -> None:
    colour, ink, advice = _BLOCK[title.outcome]
    block = _Box(_EDGE, _EDGE, 470, _HEADER - _EDGE)
    _fill(image, block, colour)
    if title.outcome is Outcome.ERROR:
        _hatch(image, block)
    corner = (block.x + block.width - 1, block.y + block.height - 1)
    cv2.rectangle(image, (block.x, block.y), corner, _INK, 4)
    _shape(image, title.outcome, (block.x + 88, block.y + block.height // 2), 58, ink, colour)
    _text(image, title.outcome.value, (block.x + 168, block.y + 98), 2.6, ink, bold=True, room=288)
    _text(image, advice, (block.x + 170, block.y + 138), 0.7, ink, room=286)

    x, right = block.x + block.width + 24, SIZE[1] - _EDGE
    named = f"{title.serial}   {title.line}".strip()
    _text(image, named, (x, block.y + 26), 0.8, _INK, bold=True, room=right - x - 110)
    if title.latency_ms is not None:
        text = f"{title.latency_ms:.0f} ms"
        _text(image, text, (right - _width(text, 0.7), block.y + 26), 0.7, _MUTED)
    y = block.y + 58
    lines = list(reasons)[:4]
    if len(reasons) > 4:
        lines = [*list(reasons)[:3], f"and {len(reasons) - 3} more reasons, see the record"]
    for line in lines:
        cv2.rectangle(image, (x, y - 10), (x + 8, y - 2), _INK, cv2.FILLED)
        _text(image, line, (x + 20, y), 0.65, _INK, room=right - x - 20)
        y += 27
    detail = "   ".join(title.details)
    _text(image, detail, (x, block.y + block.height - 6), 0.5, _MUTED, room=right - x)


def _shape(
    image: ByteImage,
    outcome: Outcome,
    centre: tuple[int, int],
    radius: int,
    ink: Colour,
    paper: Colour,
) -> None:
    """PASS: disc, tick. FAIL: octagon, cross. UNSURE: triangle with ?. ERROR: square with !."""
    x, y = centre
    if outcome is Outcome.PASS:
        cv2.circle(image, centre, radius, ink, cv2.FILLED, cv2.LINE_AA)
        tick = np.array([[x - 28, y + 2], [x - 8, y + 24], [x + 30, y - 22]], np.int32)
        cv2.polylines(image, [tick], False, paper, 13, cv2.LINE_AA)
        return
    if outcome is Outcome.FAIL:
        angles = np.deg2rad(22.5 + 45 * np.arange(8))
        points = np.rint([[x + radius * np.cos(a), y + radius * np.sin(a)] for a in angles])
        cv2.fillPoly(image, [points.astype(np.int32)], ink, cv2.LINE_AA)
        for sign in (-1, 1):
            start, end = (x - 25, y - 25 * sign), (x + 25, y + 25 * sign)
            cv2.line(image, start, end, paper, 14, cv2.LINE_AA)
        return
    if outcome is Outcome.UNSURE:
        points = np.array([[x, y - 62], [x + 66, y + 52], [x - 66, y + 52]], np.int32)
        cv2.fillPoly(image, [points], ink, cv2.LINE_AA)
        sign, size, drop = "?", 2.4, 40
    else:
        cv2.rectangle(image, (x - 52, y - 52), (x + 52, y + 52), ink, cv2.FILLED)
        sign, size, drop = "!", 3.0, 32
    _text(image, sign, (x - _width(sign, size, bold=True) // 2, y + drop), size, paper, bold=True)


def _hatch(image: ByteImage, block: _Box) -> None:
    """Slanted stripes along the block's rim: ERROR is no statement about the part."""
    rim = np.zeros(image.shape[:2], np.uint8)
    corner = (block.x + block.width - 1, block.y + block.height - 1)
    cv2.rectangle(rim, (block.x + 9, block.y + 9), (corner[0] - 9, corner[1] - 9), 1, 12)
    rows, columns = np.indices(rim.shape)
    image[(rim > 0) & ((rows + columns) % 24 < 12)] = _WHITE


def _footer(image: ByteImage, marks: Sequence[MarkPicture]) -> None:
    y = SIZE[0] - _FOOTER // 2
    text = "all views at one scale"
    if any(grid.any() for mark in marks for grid in mark.grids.values()):
        cv2.rectangle(image, (_EDGE, y - 10), (_EDGE + 16, y + 6), _DARK, cv2.FILLED)
        cv2.rectangle(image, (_EDGE + 2, y - 8), (_EDGE + 14, y + 4), _CELL, 2)
        text = "defect cells (16 x 16 a view)      " + text
        _text(image, text, (_EDGE + 26, y + 4), 0.55, _MUTED)
    else:
        _text(image, text, (_EDGE, y + 4), 0.55, _MUTED)


def _scale_bar(image: ByteImage, mm_per_px: float, right: int, y: int) -> None:
    """A bar of a round length between 60 and 200 px, its right end at `right`."""
    length = next(
        (
            step * 10.0**power
            for power in range(-3, 5)
            for step in (1, 2, 5)
            if step * 10.0**power / mm_per_px >= 60
        ),
        10.0,
    )
    pixels = round(length / mm_per_px)
    left = right - pixels
    cv2.rectangle(image, (left, y + 2), (right, y + 6), _INK, cv2.FILLED)
    for x in (left, right):
        cv2.line(image, (x, y - 3), (x, y + 11), _INK, 2)
    text = f"{length:g} mm"
    _text(image, text, (left - _width(text, 0.6) - 12, y + 10), 0.6, _INK)


# ---------------------------------------------------------------- ink


def _badge(
    image: ByteImage, letter: str, centre: tuple[int, int], radius: int, flagged: bool
) -> None:
    cv2.circle(image, centre, radius, _FLAG if flagged else _INK, cv2.FILLED, cv2.LINE_AA)
    size = radius / 18
    (width, height), _ = cv2.getTextSize(letter, cv2.FONT_HERSHEY_DUPLEX, size, 1)
    origin = (centre[0] - width // 2, centre[1] + height // 2)
    _text(image, letter, origin, size, _WHITE, bold=True)


def _fill(image: ByteImage, box: _Box, colour: Colour) -> None:
    image[box.y : box.y + box.height, box.x : box.x + box.width] = colour


def _plain(text: str) -> str:
    """Text that every OpenCV font can draw: ASCII, other signs as `?`."""
    decomposed = unicodedata.normalize("NFKD", text)
    kept = "".join(c for c in decomposed if not unicodedata.combining(c))
    return "".join(c if " " <= c <= "~" else "?" for c in kept)


def _font(bold: bool) -> int:
    return cv2.FONT_HERSHEY_DUPLEX if bold else cv2.FONT_HERSHEY_SIMPLEX


def _width(text: str, size: float, *, bold: bool = False) -> int:
    return int(cv2.getTextSize(_plain(text), _font(bold), size, 1)[0][0])


def _text(
    image: ByteImage,
    text: str,
    origin: tuple[int, int],
    size: float,
    colour: Colour,
    *,
    bold: bool = False,
    room: int | None = None,
) -> None:
    """Draw at a baseline. What exceeds `room` px is set smaller (to 70 %), then cut with dots."""
    text = _plain(text)
    if room is not None and _width(text, size, bold=bold) > room:
        size *= max(0.7, 0.98 * room / _width(text, size, bold=bold))
        while len(text) > 1 and _width(text, size, bold=bold) > room:
            text = text.rstrip(".")[:-1].rstrip() + "..."
    cv2.putText(image, text, origin, _font(bold), size, colour, 1, cv2.LINE_AA)


def _centred(image: ByteImage, text: str, box: _Box, size: float, colour: Colour) -> None:
    origin = (box.x + (box.width - _width(text, size)) // 2, box.y + box.height // 2)
    _text(image, text, origin, size, colour)
