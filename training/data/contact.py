"""Pages to look at: samples of a pool with their truth, and what the pool holds as bars.

RGB pictures uint8 [H, W, 3]. Knows pools and drawing; makes no samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.views import MARKS, NANO_LAYOUT
from forge_station.geometry import ink, picture
from training.data import shards
from training.data.pool import KINDS

Page = NDArray[np.uint8]
_EDGE, _TITLE = 10, 30
_RED: ink.Colour = (255, 64, 64)
_CLASSES: Mapping[str, ink.Colour] = {
    tasks.NORMAL: (96, 102, 108),
    "crack": (176, 0, 32),
    "cut": (0, 110, 150),
    "deformation": (120, 70, 160),
    "dent": (190, 110, 0),
}
# Classes of defect size in camera pixels, a factor of two each.
_SIZES = 2.0 ** np.arange(-1, 8)


def write(page: Page, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture.encode(page))


def page(folder: Path, rows: int = 10) -> Page:
    """A page of a pool's first shards: what is seen, what is true of it."""
    held = shards.numbers(folder)[:4]
    metas = [shards.read_meta(folder, number) for number in held]
    images = [shards.images_of(folder, number) for number in held]
    meta = {key: np.concatenate([m[key] for m in metas]) for key in metas[0]}
    first = np.cumsum([0, *map(len, images)])

    def image(i: int) -> Page:
        number = int(np.searchsorted(first, i, side="right")) - 1
        return np.asarray(images[number][i - first[number]])

    if "defect" in meta:
        chosen = _classes_and_sizes(meta, rows)
        return _tiled([_surface(image(i), meta, i) for i in chosen], 2)
    return _tiled([_sheet(image(i), meta, i) for i in range(min(rows, int(first[-1])))], 2)


def _classes_and_sizes(meta: Mapping[str, NDArray[Any]], rows: int) -> list[int]:
    """Samples of every class in turn, from the smallest defect to the largest, two a row."""
    each = max(1, 2 * rows // len(tasks.SURFACE_CLASSES))
    chosen = []
    for kind in range(len(tasks.SURFACE_CLASSES)):
        of_kind = np.flatnonzero(meta["defect"] == kind)
        of_kind = of_kind[np.argsort(meta["defect_scale"][of_kind], kind="stable")]
        places = np.linspace(0, len(of_kind) - 1, min(each, len(of_kind)))
        chosen += of_kind[np.rint(places).astype(int)].tolist()
    return chosen


def _surface(image: Page, meta: Mapping[str, NDArray[Any]], i: int) -> Page:
    """Shade of the three views, defect cells outlined; class, part, sizes, score above."""
    kind = tasks.SURFACE_CLASSES[int(meta["defect"][i])]
    part = CATALOGUE[int(meta["part"][i])].id
    mm, pixel = float(meta["defect_mm"][i]), float(meta["pixel_mm"][i])
    size = "" if kind == tasks.NORMAL else f"{mm:.2f} mm = {mm / pixel:.1f} px"
    panel = NANO_LAYOUT.panel
    shown = np.repeat(image[..., :1], 3, axis=2)
    shown[image[..., 0] == 0] = ink.DARK
    for view, grid in enumerate(meta["grid"][i]):
        mask = np.kron(grid.astype(np.uint8), np.ones((panel // 16, panel // 16), np.uint8))
        lines, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        target = np.ascontiguousarray(shown[:, view * panel : (view + 1) * panel])
        for colour, thick in ((ink.DARK, 4), (_RED, 2)):
            cv2.drawContours(target, lines, -1, colour, thick)
        shown[:, view * panel : (view + 1) * panel] = target
    card = _card(shown)
    cv2.rectangle(card, (6, 7), (132, 25), _CLASSES[kind], cv2.FILLED)
    ink.text(card, kind, (12, 21), 0.5, ink.WHITE, bold=True)
    ink.text(card, part, (146, 21), 0.5, ink.INK, room=210)
    ink.text(card, size, (370, 21), 0.5, ink.INK)
    score = f"score {int(meta['score'][i])}/10"
    ink.text(card, score, (shown.shape[1] - ink.width(score, 0.5) - 8, 21), 0.5, ink.MUTED)
    return card


def _sheet(image: Page, meta: Mapping[str, NDArray[Any]], i: int) -> Page:
    """The sheet at twice its size; the scene above, what lies at each mark and its size below."""
    factor = 2
    grey = np.repeat(image[..., :1], 3, axis=2)
    grey[image[..., 0] == 0] = ink.DARK
    shown = np.asarray(cv2.resize(grey, None, fx=factor, fy=factor), np.uint8)
    card = _card(shown, below=56)
    scene = KINDS[int(meta["kind"][i])] if "kind" in meta else ""
    if scene in KINDS[:2]:
        right = ("correct", "complete")[KINDS.index(scene)]
        scene += f", {right}" if meta["right"][i] else f", not {right}"
    ink.text(card, scene, (10, 21), 0.55, ink.INK, bold=True)
    scale = f"{float(meta['mm_per_px'][i]):.2f} mm/px"
    ink.text(card, scale, (shown.shape[1] - ink.width(scale, 0.5) - 8, 21), 0.5, ink.MUTED)
    step, under = factor * NANO_LAYOUT.cell, _TITLE + shown.shape[0]
    for column in range(int(meta["count"][i])):
        model = CATALOGUE[int(meta["part"][i, column])]
        kind, _, number = model.id.rpartition(" ")
        box = "x".join(f"{value:.1f}" for value in meta["size"][i, column])
        words = (f"{MARKS[column]}: {kind.replace('_', ' ')}", number, f"{box} mm")
        for row, word in enumerate(words):
            at = (column * step + 4, under + 16 + 16 * row)
            ink.text(card, word, at, 0.38, ink.MUTED if row == 2 else ink.INK, room=step - 6)
    return card


def _card(shown: Page, below: int = 4) -> Page:
    height, width = shown.shape[:2]
    card = np.full((height + _TITLE + below, width, 3), ink.CARD, np.uint8)
    card[_TITLE : _TITLE + height] = shown
    return card


def _tiled(cards: Sequence[Page], columns: int) -> Page:
    height, width = cards[0].shape[:2]
    rows = -(-len(cards) // columns)
    size = (rows * (height + _EDGE) + _EDGE, columns * (width + _EDGE) + _EDGE, 3)
    out = np.full(size, ink.PAPER, np.uint8)
    for number, card in enumerate(cards):
        top = _EDGE + number // columns * (height + _EDGE)
        left = _EDGE + number % columns * (width + _EDGE)
        out[top : top + height, left : left + width] = card
    return out


# ---------------------------------------------------------------- what a pool holds


def statistics(folder: Path, held: Mapping[str, Any]) -> Page:
    """Bars: classes or scenes, workpieces, and defect sizes (camera pixels) by class."""
    groups = [(name, value) for name, value in held.items() if isinstance(value, dict)]
    tables = [_bars(name, value, _CLASSES) for name, value in groups]
    metas = [shards.read_meta(folder, number) for number in shards.numbers(folder)]
    if metas and "defect_mm" in metas[0]:
        tables.append(_sizes(metas))
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(t, ((0, 0), (0, width - t.shape[1]), (0, 0)), "edge") for t in tables]
    title = np.full((40, width, 3), ink.CARD, np.uint8)
    words = f"{folder.name}: {held['samples']} samples in {held['shards']} shards"
    ink.text(title, words, (12, 27), 0.7, ink.INK, bold=True)
    return np.concatenate([title, *padded], axis=0)


def _bars(
    title: str, counted: Mapping[str, int], colours: Mapping[str, ink.Colour], width: int = 900
) -> Page:
    table = np.full((36 + 22 * len(counted), width, 3), ink.CARD, np.uint8)
    ink.text(table, title, (12, 24), 0.55, ink.INK, bold=True)
    total, most = max(sum(counted.values()), 1), max(*counted.values(), 1)
    for row, (name, count) in enumerate(counted.items()):
        top = 34 + 22 * row
        ink.text(table, name, (12, top + 14), 0.45, ink.INK, room=180)
        end = 200 + round((width - 340) * count / most)
        cv2.rectangle(table, (200, top), (end, top + 16), colours.get(name, ink.MUTED), cv2.FILLED)
        share = f"{count}  {count / total:.1%}"
        ink.text(table, share, (end + 8, top + 14), 0.45, ink.INK)
    return table


def _sizes(metas: Sequence[Mapping[str, NDArray[Any]]], width: int = 900) -> Page:
    """Histogram of defect sizes in camera pixels, a bar for every class side by side."""
    defect = np.concatenate([m["defect"] for m in metas])
    size = np.concatenate([m["defect_mm"] / m["pixel_mm"] for m in metas])
    counted = {
        name: np.histogram(size[defect == tasks.SURFACE_CLASSES.index(name)], _SIZES)[0]
        for name in tasks.DEFECT_CLASSES
    }
    most = max(*(int(count.max()) for count in counted.values()), 1)
    table = np.full((250, width, 3), ink.CARD, np.uint8)
    ink.text(table, "defect size, camera pixels", (12, 24), 0.55, ink.INK, bold=True)
    step = (width - 40) // (len(_SIZES) - 1)
    for number, (name, count) in enumerate(counted.items()):
        ink.text(table, name, (300 + 140 * number, 24), 0.5, _CLASSES[name], bold=True)
        for bin_, value in enumerate(count.tolist()):
            left = 20 + bin_ * step + number * (step - 12) // len(counted)
            right = left + (step - 12) // len(counted) - 2
            top = 215 - round(165 * value / most)
            cv2.rectangle(table, (left, top), (right, 215), _CLASSES[name], cv2.FILLED)
            ink.text(table, str(value), (left, top - 4), 0.32, ink.MUTED)
    for bin_, low in enumerate(_SIZES[:-1]):
        words = f"{low:g} to {2 * low:g}"
        ink.text(table, words, (20 + bin_ * step, 236), 0.45, ink.INK)
    return table
