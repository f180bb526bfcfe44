"""What a model behind an endpoint is shown: one picture, or points as text.

    metric       front, side and top of every part at one scale, grey, as the station draws them
    channels     the same in the station's three channels, for a model that was trained on them
    forge        the published composite: one colour a part, each panel at its own scale
    coordinates  no picture: points as text (the published control, near chance)

A photo is sent as it is, but not larger than `LARGEST_PX`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station import checks
from forge_station.contract.views import LARGE_LAYOUT, MARKS
from forge_station.errors import InputError
from forge_station.geometry import forge_style, sheet
from forge_station.geometry.pose import PartCloud
from training.evaluation import prompts
from training.evaluation.case_files import Case
from training.evaluation.case_input import Seen

METRIC, CHANNELS, FORGE, COORDINATES = "metric", "channels", "forge", "coordinates"
STYLES = (METRIC, CHANNELS, FORGE, COORDINATES)
LARGEST_PX = 1536
_TRAY_POINTS, _SURFACE_POINTS = 96, 400
ByteImage = NDArray[np.uint8]


@dataclass(frozen=True)
class Shown:
    """Parts of a chat message, the words that explain them, and where each mark stands."""

    parts: tuple[Mapping[str, object], ...]
    words: str
    column_of: Mapping[str, int] = field(default_factory=dict)


def shown_of(case: Case, seen: Seen, folder: Path, style: str) -> Shown:
    """The picture of a case in a style."""
    surface = case.task == "surface"
    if case.input.photo:
        words = prompts.view_text("photo", surface=surface, mm_per_px=0.0, marks=case.input.marks)
        return Shown((_photo(folder / case.input.photo),), words)
    if seen.pictures is not None:
        drawn = seen.pictures.surface if surface else seen.pictures.marks
        return _drawn(drawn, style, surface)
    if not seen.parts:
        return Shown((), "")
    if surface:
        part = max(seen.parts, key=lambda item: len(item.points))
        return of_parts([part], style, surface=True)
    return of_parts(seen.parts, style, surface=False)


def of_parts(parts: Sequence[PartCloud], style: str, *, surface: bool) -> Shown:
    """The picture of separated parts."""
    clouds = [part.points for part in parts]
    if style == COORDINATES:
        return _as_text(parts, surface)
    if style == FORGE:
        image = forge_style.surface(clouds[0]) if surface else forge_style.composite(_placed(parts))
        words = prompts.view_text(FORGE, surface=surface, mm_per_px=0.0)
        return Shown((image_part(image),), words)
    if surface:
        return _drawn(sheet.surface_picture(clouds[0], LARGE_LAYOUT)[0], style, True)
    columns = checks.columns_of(len(parts), LARGE_LAYOUT)
    return _drawn(sheet.marks_sheet(clouds, columns, LARGE_LAYOUT), style, False)


def _drawn(picture: sheet.Sheet, style: str, surface: bool) -> Shown:
    if style not in (METRIC, CHANNELS):
        raise InputError(
            "ready views cannot be drawn in this style", expected=f"{METRIC} or {CHANNELS}",
            got=style,
        )  # fmt: skip
    image = picture.image
    if style == METRIC:
        image = np.repeat(image[..., :1], 3, axis=2)
    words = prompts.view_text(style, surface=surface, mm_per_px=picture.mm_per_px)
    return Shown((image_part(image),), words, picture.column_of)


def _placed(parts: Sequence[PartCloud]) -> list[NDArray[np.float64]]:
    """The parts where they lie on the tray, mm."""
    found = []
    for part in parts:
        matrix = part.tray_from_part
        found.append(part.points.astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3])
    return found


def _as_text(parts: Sequence[PartCloud], surface: bool) -> Shown:
    count = _SURFACE_POINTS if surface else _TRAY_POINTS
    blocks = []
    for mark, points in zip(MARKS, _placed(parts), strict=False):
        rng = np.random.default_rng(0)
        chosen = points[rng.choice(len(points), min(count, len(points)), replace=False)]
        lines = [f"{x:.1f} {y:.1f} {z:.1f}" for x, y, z in chosen]
        blocks.append("\n".join(lines if surface else [f"Part {mark}:", *lines]))
    words = prompts.view_text(COORDINATES, surface=surface, mm_per_px=0.0)
    return Shown(({"type": "text", "text": "\n\n".join(blocks)},), words)


def image_part(image: ByteImage) -> Mapping[str, object]:
    """RGB uint8 [H, W, 3] as a part of a chat message, PNG in a data address."""
    return _data(encoded(image), "png")


def encoded(image: ByteImage) -> bytes:
    """PNG of an RGB picture."""
    _, png = cv2.imencode(".png", cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2BGR))
    return png.tobytes()


def _photo(path: Path) -> Mapping[str, object]:
    data = path.read_bytes()
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise InputError("not a readable image", which=path)
    longest = max(image.shape[:2])
    if longest > LARGEST_PX:
        factor = LARGEST_PX / longest
        image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
    elif path.suffix.lower() in (".jpg", ".jpeg"):
        return _data(data, "jpeg")
    _, png = cv2.imencode(".png", image)
    return _data(png.tobytes(), "png")


def _data(data: bytes, kind: str) -> Mapping[str, object]:
    address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}
