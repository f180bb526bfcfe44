"""A page of loaded examples with their grids and answers, because people look rather than read."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from forge_station.contract import tasks
from forge_station.contract.grid_text import parse_columns
from training.data import examples
from training.data.conversations import PHOTO
from training.data.examples import Branch, Example
from training.data.loaders.sample import LoadError, Picture

_TILE, _TEXT, _COLUMNS = 260, 62, 5
_PAPER, _INK, _CELL = (250, 250, 248), (30, 30, 30), (230, 60, 20)
_ROW = re.compile(r"(\w+) r(\d+):")
_PLACE = re.compile(r"^([A-Z]) \[([\d.]+),([\d.]+)\]$", re.MULTILINE)


def page(path: Path, out: Path, count: int = 30, seed: int = 0) -> int:
    """Draw up to `count` examples of a file, spread over their classes; returns how many."""
    chosen = _spread(list(examples.read(path)), count, seed)
    if not chosen:
        raise LoadError("no examples", which=path)
    rows = -(-len(chosen) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _TILE, rows * (_TILE + _TEXT)), _PAPER)
    for number, example in enumerate(chosen):
        place = (number % _COLUMNS * _TILE, number // _COLUMNS * (_TILE + _TEXT))
        sheet.paste(_drawn(example, path.parent), place)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.part")
    sheet.save(draft, "PNG")
    draft.replace(out)
    return len(chosen)


def _spread(found: list[Example], count: int, seed: int) -> list[Example]:
    """Round robin over the first answer line, so that a rare class is on the page."""
    random.Random(seed).shuffle(found)
    kinds: dict[str, list[Example]] = {}
    for example in found:
        kinds.setdefault(example.messages[-1].content.split("\n")[0], []).append(example)
    out: list[Example] = []
    while len(out) < count and any(kinds.values()):
        for name in sorted(kinds):
            if kinds[name] and len(out) < count:
                out.append(kinds[name].pop())
    return out


def _drawn(example: Example, folder: Path) -> Image.Image:
    tile = Image.new("RGB", (_TILE, _TILE + _TEXT), _PAPER)
    answers = [m.content for m in example.messages if m.role == "assistant"]
    lines = [line for text in answers for line in examples.branches(text)]
    if example.images:
        picture = Picture(folder / example.images[-1]).decoded().convert("RGB")
        scale = min((_TILE - 6) / picture.width, (_TILE - 6) / picture.height)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.BILINEAR)
        _draw_grids(picture, lines)
        _draw_places(picture, example.messages[-2].content)
        tile.paste(picture, (3, 3))
    words = [f"{b.key} {b.answer}" for b in lines if not _ROW.fullmatch(b.key)]
    weight = "" if example.weight == 1 else f"  weight {example.weight:g}"
    text = [f"{example.id}"[-40:], f"{example.split}  {example.group}{weight}"[:42]]
    text += _wrapped("  ".join(words), 42)[:3]
    draw = ImageDraw.Draw(tile)
    font = ImageFont.load_default(11)
    for row, line in enumerate(text):
        draw.text((4, _TILE + 12 * row), line, fill=_INK, font=font)
    return tile


def _draw_grids(picture: Image.Image, lines: Sequence[Branch]) -> None:
    """Outline the defective cells; views other than the photo are panels side by side."""
    views = list(dict.fromkeys(view for view, _, _ in _cells(lines)))
    named = [b.key[:-1] for b in lines if b.answer == tasks.NONE]
    panels = [PHOTO] if PHOTO in (*views, *named) else ["front", "side", "top"]
    width, height = picture.width / len(panels), picture.height
    draw = ImageDraw.Draw(picture)
    for view, row, column in _cells(lines):
        if view in panels:
            x, y = panels.index(view) * width + column * width / 16, row * height / 16
            draw.rectangle((x, y, x + width / 16, y + height / 16), outline=_CELL)


def _draw_places(picture: Image.Image, facts: str) -> None:
    """The letters of marks whose places the question states (`A [0.43,0.44]`)."""
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(14)
    for mark, x, y in _PLACE.findall(facts):
        at = (float(x) * picture.width, float(y) * picture.height)
        draw.text(at, mark, fill=_CELL, font=font, anchor="mm", stroke_width=2, stroke_fill=_PAPER)


def _cells(lines: Sequence[Branch]) -> list[tuple[str, int, int]]:
    """(view, row, column), 0-based, of every row line."""
    return [
        (match[1], int(match[2]) - 1, column)
        for line in lines
        if (match := _ROW.fullmatch(line.key))
        for column in parse_columns(line.answer)
    ]


def _wrapped(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]
