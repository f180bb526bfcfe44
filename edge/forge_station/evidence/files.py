"""What is kept of an inspection for people and for training, as files.

    <name>.png, <name>.verdict.json
    <name>.input.json               which pictures the model was given, and the facts beside each
    <name>.sheet.png, <name>.surface-A.png ...      those pictures, to the bit

With a person's label the last ones become training examples (`training.load evidence`).
Files appear whole or not at all, and a disk that is full or read-only is a warning, never an
error: the verdict goes to MES by another way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_station.contract import tasks
from forge_station.contract.verdict import Verdict
from forge_station.contract.views import NANO_LAYOUT, Layout
from forge_station.evidence.pictures import picture_of
from forge_station.geometry import picture
from forge_station.pipeline import Inspection

INPUT_SCHEMA = "forge-station.input/1.0"
_FAST = 1
"""PNG compression of files that are kept for later and not sent."""


@dataclass(frozen=True)
class Stored:
    """The files of one inspection; a path is None where the file could not be written."""

    verdict: Path | None
    picture: Path | None
    inputs: tuple[Path, ...] = ()
    """What the model was given: its pictures, and last the JSON that lists them."""
    warnings: tuple[str, ...] = ()


def store(
    folder: Path, inspection: Inspection, layout: Layout = NANO_LAYOUT, name: str | None = None
) -> Stored:
    """Write the files of an inspection; the default name is serial and result id.

    Never raises for the file system: what could not be written is in `warnings`.
    """
    name = name or default_name(inspection.verdict)
    png = picture_of(inspection, layout)
    return store_files(folder, name, inspection.verdict, png, inputs_of(inspection, name))


def store_files(
    folder: Path,
    name: str,
    verdict: Verdict,
    png: bytes,
    inputs: Mapping[str, bytes] | None = None,
) -> Stored:
    """As `store`, of a picture that is drawn already and of `inputs_of`."""
    warnings: list[str] = []

    def written(path: Path, content: bytes) -> Path | None:
        try:
            write_whole(path, content)
        except OSError as error:
            warnings.append(f"evidence not written ({path}): {error.strerror or error}")
            return None
        return path

    picture = written(folder / f"{name}.png", png)
    kept = written(folder / f"{name}.verdict.json", json_bytes(verdict.to_dict()))
    files: list[Path] = []
    for file, content in (inputs or {}).items() if kept is not None else ():
        path = written(folder / file, content)
        if path is None:
            break
        files.append(path)
    return Stored(kept, picture, tuple(files), tuple(warnings))


def inputs_of(inspection: Inspection, name: str) -> dict[str, bytes]:
    """File name -> content of what the model was given; {} when it was given nothing.

    PNG channels are those of the model's picture (red shade, green relief, blue height or
    difference). A second look is listed under `closer`, with the upper left cells of its windows.
    The JSON comes last, so that whoever finds it finds the pictures.
    """
    parts = {part.mark: part for part in inspection.verdict.parts if part.size_mm is not None}
    files: dict[str, bytes] = {}
    listed: list[dict[str, str]] = []
    if inspection.marks_picture is not None and parts:
        sizes = {mark: part.size_mm for mark, part in parts.items() if part.size_mm}
        facts = tasks.sheet_facts(sizes, inspection.marks_picture.mm_per_px)
        files[f"{name}.sheet.png"] = picture.encode(inspection.marks_picture.image, _FAST)
        listed.append({"file": f"{name}.sheet.png", "facts": facts})
    for mark, seen in sorted(inspection.surface_pictures.items()):
        if mark in parts and (size := parts[mark].size_mm):
            file = f"{name}.surface-{mark}.png"
            files[file] = picture.encode(seen.image, _FAST)
            facts = tasks.surface_facts(parts[mark].part, size)
            listed.append({"file": file, "mark": mark, "facts": facts})
    closer: list[dict[str, Any]] = []
    for mark, look in sorted(inspection.closer_looks.items()):
        file = f"{name}.surface-{mark}-closer.png"
        files[file] = picture.encode(look.picture.image, _FAST)
        windows = {view: list(window) for view, window in look.windows.items()}
        closer.append({"file": file, "mark": mark, "windows": windows})
    if listed:
        result = {"schema": INPUT_SCHEMA, "result_id": inspection.verdict.result_id}
        looks = {"closer": closer} if closer else {}
        files[f"{name}.input.json"] = json_bytes(result | {"pictures": listed} | looks)
    return files


def json_bytes(data: object) -> bytes:
    """JSON for a person to read. Raises ValueError for NaN."""
    return f"{json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()


def default_name(verdict: Verdict) -> str:
    """`<serial>-<end of the result id>`: the same part inspected twice keeps both."""
    return name_of({"serial": verdict.serial, "result_id": verdict.result_id})


def name_of(verdict: Mapping[str, Any]) -> str:
    """As `default_name`, of `Verdict.to_dict()`."""
    return f"{file_name(verdict['serial'])}-{file_name(verdict['result_id'])[-8:]}"


def file_name(text: str) -> str:
    """`text` with everything that a file name should not hold replaced by `_`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80] or "part"


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the place, flush to disk, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
