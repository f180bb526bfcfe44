"""The picture of a verdict for the person at the line: outcome, reasons, what was seen and read.

It does not know how anything was decided, and makes no file (`encode` gives PNG bytes). An
outcome is a colour, a word and a shape, so that it reads without colours. Letters stand beside
the views, never on a part. All marks share one scale: what looks larger is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.verdict import Outcome
from forge_station.contract.views import VIEWS
from forge_station.geometry import ink
from forge_station.geometry.ink import Box, ByteImage, Colour

Grid = NDArray[np.bool_]

SIZE = (900, 1280)
_HEADER, _FOOTER, _EDGE, _GAP = 190, 44, 12, 6
_ADVICE: Mapping[Outcome, str] = {
    Outcome.PASS: "may go on",
    Outcome.FAIL: "take it out",
    Outcome.UNSURE: "a person must look",
    Outcome.ERROR: "the station could not decide",
}
# Ink of a flagged mark on a card; contrast at least 5:1.
_FLAG: Mapping[Outcome, Colour] = {
    Outcome.PASS: ink.INK,
    Outcome.FAIL: (176, 0, 32),
    Outcome.UNSURE: (128, 80, 0),
    Outcome.ERROR: (11, 61, 145),
}
_CELL: Colour = (255, 64, 64)
_TICK: Colour = (96, 102, 108)
# Heights above and below the views of a column, width beside the views of a row.
_CARD_TOP, _CARD_BOTTOM, _ROW_SIDE = 34, 92, 260
_REASON_LINES = 5


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
    """The header beside the outcome. `details`: short lines such as bundle and time.

    `metric` False: the size of a pixel is not known (a photo), so no scale bar is drawn.
    """

    outcome: Outcome
    serial: str
    line: str = ""
    latency_ms: float | None = None
    details: tuple[str, ...] = ()
    metric: bool = True


def draw(title: Title, reasons: Sequence[str], marks: Sequence[MarkPicture]) -> ByteImage:
    """One RGB picture, uint8 [900, 1280, 3]. `reasons` in order of weight; none for a PASS."""
    height, width = SIZE
    image = np.full((height, width, 3), ink.PAPER, np.uint8)
    _header(image, title, reasons)
    body = Box(_EDGE, _HEADER + _EDGE, width - 2 * _EDGE, height - _HEADER - _FOOTER - 2 * _EDGE)
    if marks:
        mm_per_px = _body(image, body, marks, title.outcome)
        _footer(image, marks)
        if title.metric:
            _scale_bar(image, mm_per_px, width - _EDGE, height - _FOOTER // 2 - _EDGE // 2)
    else:
        body.of(image)[:] = ink.CARD
        words = "no part to show"
        left = body.x + (body.width - ink.width(words, 1.0)) // 2
        ink.text(image, words, (left, body.y + body.height // 2), 1.0, ink.MUTED)
    return image


def encode(image: ByteImage, compression: int = 3) -> bytes:
    """PNG bytes of an RGB or RGBA picture; `compression` 0 to 9, 1 is fast."""
    swap = cv2.COLOR_RGB2BGR if image.shape[2] == 3 else cv2.COLOR_RGBA2BGRA
    settings = [cv2.IMWRITE_PNG_COMPRESSION, compression]
    done, data = cv2.imencode(".png", cv2.cvtColor(image, swap), settings)
    if not done:
        raise ValueError(f"PNG encoding failed for an image of shape {image.shape}")
    return data.tobytes()


# ---------------------------------------------------------------- layout


@dataclass(frozen=True)
class _Card:
    """Where a mark is drawn: the whole card, its three views, and its text."""

    box: Box
    views: tuple[Box, Box, Box]
    text: Box
    large: bool


def _body(image: ByteImage, body: Box, marks: Sequence[MarkPicture], outcome: Outcome) -> float:
    """Draw all marks; returns the common scale, mm per pixel of the picture."""
    cards = _cards(body, len(marks))
    window = cards[0].views[0]
    mm_per_px = max(
        max(tall / (window.height - 8), wide / (window.width - 8))
        for tall, wide in map(_extent_mm, marks)
    )
    for mark, card in zip(marks, cards, strict=True):
        card.box.of(image)[:] = ink.CARD
        for view, box in zip(VIEWS, card.views, strict=True):
            _view(box.of(image), mark, view, mm_per_px)
        colour = _FLAG[outcome] if mark.flagged else ink.INK
        if card.large:
            _large_text(image, card.text, mark, colour)
        else:
            _column_text(image, card, mark, colour)
        if mark.flagged:
            ink.frame(image, card.box, colour, 4)
            radius = 22 if card.large else 12
            edge = card.text.x + card.text.width if card.large else card.box.x + card.box.width
            centre = (edge - radius - 12, card.text.y + (38 if card.large else 17))
            ink.shape(image, outcome, centre, radius, colour, ink.CARD)
    return mm_per_px


def _cards(body: Box, count: int) -> list[_Card]:
    """One mark: four fields, like a drawing (front over top). Two: rows. More: columns."""
    if count == 1:
        wide, high = (body.width - 3 * _GAP) // 2, (body.height - 3 * _GAP) // 2
        fields = [
            Box(body.x + _GAP + i * (wide + _GAP), body.y + _GAP + j * (high + _GAP), wide, high)
            for j in (0, 1)
            for i in (0, 1)
        ]
        return [_Card(body, (fields[0], fields[1], fields[2]), fields[3], True)]
    cards = []
    if count == 2:
        high = (body.height - _EDGE) // 2
        wide = (body.width - _ROW_SIDE - 3 * _GAP) // 3
        for j in (0, 1):
            box = Box(body.x, body.y + j * (high + _EDGE), body.width, high)
            left, top = box.x + _ROW_SIDE, box.y + _GAP
            views = [Box(left + i * (wide + _GAP), top, wide, high - 2 * _GAP) for i in range(3)]
            text = Box(box.x + _GAP, top, _ROW_SIDE - 2 * _GAP, high - 2 * _GAP)
            cards.append(_Card(box, (views[0], views[1], views[2]), text, True))
        return cards
    wide = (body.width - (count - 1) * _EDGE) // count
    high = (body.height - _CARD_TOP - _CARD_BOTTOM - 2 * _GAP) // 3
    for i in range(count):
        box = Box(body.x + i * (wide + _EDGE), body.y, wide, body.height)
        top = box.y + _CARD_TOP
        views = [
            Box(box.x + _GAP, top + j * (high + _GAP), wide - 2 * _GAP, high) for j in range(3)
        ]
        cards.append(_Card(box, (views[0], views[1], views[2]), box, False))
    return cards


def _extent_mm(mark: MarkPicture) -> tuple[float, float]:
    """(height, width) mm of the centred window that shows what is filled and every defect cell."""
    tall, wide = 1.0, 1.0
    for view, shown in mark.views.items():
        filled = _grey(shown) > 0
        if view in mark.grids:
            grid = mark.grids[view]
            rows = np.arange(filled.shape[0]) * grid.shape[0] // filled.shape[0]
            columns = np.arange(filled.shape[1]) * grid.shape[1] // filled.shape[1]
            filled = filled | grid[np.ix_(rows, columns)]
        rows, columns = np.nonzero(filled.any(axis=1))[0], np.nonzero(filled.any(axis=0))[0]
        if len(rows):
            middle_row, middle_column = filled.shape[0] / 2, filled.shape[1] / 2
            tall = max(tall, 2 * max(middle_row - rows[0], rows[-1] + 1 - middle_row))
            wide = max(wide, 2 * max(middle_column - columns[0], columns[-1] + 1 - middle_column))
    return tall * mark.mm_per_px, wide * mark.mm_per_px


def _grey(shown: ByteImage) -> ByteImage:
    return shown if shown.ndim == 2 else np.ascontiguousarray(shown[..., 0])


# ---------------------------------------------------------------- a mark


def _view(target: ByteImage, mark: MarkPicture, view: str, mm_per_px: float) -> None:
    """One view, scaled to the common scale, centred in `target`, with its grid."""
    target[:] = ink.DARK
    high, wide = target.shape[:2]
    shown = mark.views.get(view)
    if shown is None:
        ink.text(target, f"{view}: not seen", (8, 20), 0.5, ink.PAPER)
        return
    plane = _grey(shown)
    factor = mark.mm_per_px / mm_per_px
    # View centre on target centre; pixel centres are whole numbers in warpAffine.
    matrix = np.array(
        [
            [factor, 0.0, wide / 2 - 0.5 - factor * (plane.shape[1] / 2 - 0.5)],
            [0.0, factor, high / 2 - 0.5 - factor * (plane.shape[0] / 2 - 0.5)],
        ]
    )
    filled = (plane > 0).astype(np.uint8) * 255
    source = plane
    if factor < 1:
        # warpAffine has no area filter: blur first, so that thin features do not break up.
        sigma = 0.4 / factor
        source = np.asarray(cv2.GaussianBlur(plane, (0, 0), sigma), np.uint8)
        filled = np.asarray(cv2.GaussianBlur(filled, (0, 0), sigma), np.uint8)
    grey = cv2.warpAffine(source, matrix, (wide, high), flags=cv2.INTER_LINEAR)
    share = cv2.warpAffine(filled, matrix, (wide, high), flags=cv2.INTER_LINEAR)
    weight = share.astype(np.float32)[..., None] / 255.0
    # `grey` already fades to black with the share; the dark background takes the rest.
    mixed = grey.astype(np.float32)[..., None] + (1.0 - weight) * np.array(ink.DARK, np.float32)
    target[:] = np.rint(np.clip(mixed, 0, 255)).astype(np.uint8)
    if view in mark.grids:
        _grid(target, mark.grids[view], matrix, plane.shape)
    ink.text(target, view, (6, high - 7), 0.45, (150, 156, 162))


def _grid(
    target: ByteImage, grid: Grid, matrix: NDArray[np.float64], shape: tuple[int, ...]
) -> None:
    """Outline the defect cells as one shape each and tick the cell raster at the rims."""
    rows, columns = grid.shape
    x = matrix[0, 2] + matrix[0, 0] * (np.arange(columns + 1) * shape[1] / columns - 0.5)
    y = matrix[1, 2] + matrix[1, 1] * (np.arange(rows + 1) * shape[0] / rows - 0.5)
    xs = [int(value) for value in np.rint(x)]
    ys = [int(value) for value in np.rint(y)]
    top, left = max(ys[0], 0), max(xs[0], 0)
    for value in xs:
        cv2.line(target, (value, top), (value, top + 4), _TICK, 1)
    for value in ys:
        cv2.line(target, (left, value), (left + 4, value), _TICK, 1)
    padded = np.pad(grid, 1)
    for colour, thick in ((ink.DARK, 5), (_CELL, 2)):
        for row, column in np.argwhere(grid).tolist():
            a, b, c, d = (
                (xs[column], ys[row]),
                (xs[column + 1], ys[row]),
                (xs[column + 1], ys[row + 1]),
                (xs[column], ys[row + 1]),
            )
            edges = (
                (padded[row, column + 1], a, b),
                (padded[row + 1, column + 2], b, c),
                (padded[row + 2, column + 1], c, d),
                (padded[row + 1, column], d, a),
            )
            for shared, start, end in edges:
                if not shared:
                    cv2.line(target, start, end, colour, thick)


def _large_text(image: ByteImage, box: Box, mark: MarkPicture, colour: Colour) -> None:
    kind, model = _words(mark)
    x, y, room = box.x + 16, box.y + 52, min(box.width - 32, 420)
    space = room - 54 - (50 if mark.flagged else 0)
    ink.badge(image, mark.mark, (x + 16, y - 14), 24, colour)
    ink.text(image, model or kind, (x + 54, y), 1.15, colour, bold=True, room=space)
    if model:
        ink.text(image, kind, (x, y + 42), 0.75, colour, room=room)
    y = _probability(image, mark, (x, y + 64), room)
    for line in [*mark.notes, *_size_lines(mark)]:
        for part in ink.wrapped(line, 0.6, room):
            y += 27
            shown = colour if line in mark.notes else ink.MUTED
            ink.text(image, part, (x, y), 0.6, shown, room=room)


def _column_text(image: ByteImage, card: _Card, mark: MarkPicture, colour: Colour) -> None:
    kind, model = _words(mark)
    box = card.box
    x, room = box.x + 8, box.width - 16
    ink.badge(image, mark.mark, (box.x + 20, box.y + 17), 13, colour)
    space = room - 36 - (26 if mark.flagged else 0)
    ink.text(image, model or kind, (x + 34, box.y + 25), 0.7, colour, bold=True, room=space)
    y = _probability(image, mark, (x, box.y + box.height - _CARD_BOTTOM + 6), room) + 18
    lines = [kind if model else "", *mark.notes, *_size_lines(mark)]
    for line in [line for line in lines if line][:3]:
        shown = colour if line in mark.notes else ink.MUTED
        ink.text(image, line, (x, y), 0.5, shown, room=room)
        y += 19


def _words(mark: MarkPicture) -> tuple[str, str]:
    """(kind, model number) of a reading such as `hex_bolt M8x30`."""
    kind, _, model = (mark.reading or "not read").rpartition(" ")
    if not mark.reading:
        return "not read", ""
    return (kind or model).replace("_", " "), model if kind else ""


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
    cv2.rectangle(image, at, (at[0] + bar, at[1] + 10), ink.WHITE, cv2.FILLED)
    cv2.rectangle(image, at, (at[0] + round(share * bar), at[1] + 10), ink.MUTED, cv2.FILLED)
    cv2.rectangle(image, at, (at[0] + bar, at[1] + 10), ink.INK, 1)
    ink.text(image, percent(share), (at[0] + bar + 8, at[1] + 11), 0.5, ink.INK)
    return at[1] + 10


def percent(share: float) -> str:
    """`97 %`; what rounds to 100 reads `>99 %`: a reading is never certain."""
    return f"{100 * share:.0f} %" if share < 0.995 else ">99 %"


# ---------------------------------------------------------------- header and footer


def _header(image: ByteImage, title: Title, reasons: Sequence[str]) -> None:
    paper, colour = ink.BLOCK[title.outcome]
    block = Box(_EDGE, _EDGE, 440, _HEADER - _EDGE)
    block.of(image)[:] = paper
    if title.outcome is Outcome.ERROR:
        ink.hatch(image, block, 14)
    ink.frame(image, block, ink.INK, 4)
    middle = block.y + block.height // 2
    ink.shape(image, title.outcome, (block.x + 88, middle), 58, colour, paper)
    x = block.x + 168
    ink.text(image, title.outcome.value, (x, middle + 10), 2.1, colour, bold=True)
    ink.text(image, _ADVICE[title.outcome], (x + 2, middle + 46), 0.65, colour, room=254)

    x, right = block.x + block.width + 24, SIZE[1] - _EDGE
    named = f"{title.serial}   {title.line}".strip()
    ink.text(image, named, (x, block.y + 24), 0.8, ink.INK, bold=True, room=right - x - 110)
    if title.latency_ms is not None:
        words = f"{title.latency_ms:.0f} ms"
        left = right - ink.width(words, 0.7)
        ink.text(image, words, (left, block.y + 24), 0.7, ink.MUTED)
    y = block.y + 52
    for first, line in reason_lines(reasons, right - x - 20):
        if first:
            cv2.rectangle(image, (x, y - 10), (x + 8, y - 2), ink.INK, cv2.FILLED)
        ink.text(image, line, (x + 20, y), 0.62, ink.INK, room=right - x - 20)
        y += 23
    detail = "   ".join(title.details)
    ink.text(image, detail, (x, block.y + block.height - 4), 0.5, ink.MUTED, room=right - x)


def reason_lines(reasons: Sequence[str], room: int) -> list[tuple[bool, str]]:
    """(starts a reason, text) of the lines that fit; the last one counts what was left out."""
    lines = [
        (index == 0, line, number)
        for number, reason in enumerate(reasons)
        for index, line in enumerate(ink.wrapped(reason, 0.62, room))
    ]
    if len(lines) <= _REASON_LINES:
        return [(first, line) for first, line, _ in lines]
    shown = lines[: _REASON_LINES - 1]
    hidden = len(reasons) - 1 - shown[-1][2]
    more = f"and {hidden} more: see the record" if hidden else "... see the record"
    return [*((first, line) for first, line, _ in shown), (False, more)]


def _footer(image: ByteImage, marks: Sequence[MarkPicture]) -> None:
    x, y = _EDGE, SIZE[0] - _FOOTER // 2
    if any(grid.any() for mark in marks for grid in mark.grids.values()):
        cv2.rectangle(image, (x, y - 10), (x + 16, y + 6), ink.DARK, cv2.FILLED)
        cv2.rectangle(image, (x + 2, y - 8), (x + 14, y + 4), _CELL, 2)
        words = "defect cells (16 x 16 a view)"
        ink.text(image, words, (x + 26, y + 4), 0.55, ink.MUTED)
        x += 26 + ink.width(words, 0.55) + 40
    ink.text(image, "all views at one scale", (x, y + 4), 0.55, ink.MUTED)


def _scale_bar(image: ByteImage, mm_per_px: float, right: int, y: int) -> None:
    """A bar of a round length of at least 60 px, its right end at `right`."""
    steps = (step * 10.0**power for power in range(-3, 5) for step in (1, 2, 5))
    length = next((step for step in steps if step / mm_per_px >= 60), 60 * mm_per_px)
    left = right - round(length / mm_per_px)
    cv2.rectangle(image, (left, y + 2), (right, y + 6), ink.INK, cv2.FILLED)
    for x in (left, right):
        cv2.line(image, (x, y - 3), (x, y + 11), ink.INK, 2)
    words = f"{length:g} mm"
    ink.text(image, words, (left - ink.width(words, 0.6) - 12, y + 10), 0.6, ink.INK)
