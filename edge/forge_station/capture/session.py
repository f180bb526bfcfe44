"""A recorded camera session: images in a folder, and what the device said of each.

    manifest.yaml    schema, frames: one line an image, appended as it is taken
    000000.png ...   8 or 16 bit, without loss

The camera driver `replay` plays it bit for bit; it also plays a folder of images without manifest
(in name order), and the images of a recorded scan (`capture.replay`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from forge_station.capture import files
from forge_station.capture.base import Clock, Frame
from forge_station.errors import InputError

SCHEMA = 1
MANIFEST = "manifest.yaml"
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
FIELDS: dict[str, type] = {
    "file": str, "sha256": str, "sequence": int, "complete": bool, "t_monotonic_ns": int,
    "t_utc_ns": int, "t_device_ns": int, "clock": str, "exposure_us": float, "gain": float,
    "pixel_format": str, "source": str,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One image of a session. Times in ns as in Frame; 0 or None where nobody wrote them down."""

    file: Path
    sequence: int
    sha256: str | None = None
    complete: bool = True
    t_monotonic_ns: int = 0
    t_utc_ns: int = 0
    t_device_ns: int | None = None
    clock: Clock = "replay"
    exposure_us: float | None = None
    gain: float | None = None
    pixel_format: str | None = None
    source: str = ""


class Recorder:
    """Writes a session frame by frame: what was written is whole even when the next one is not.

    Raises InputError when the folder holds a session already, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._manifest = (folder / MANIFEST).open("xb", buffering=0)
        except FileExistsError:
            raise InputError(
                "there is a recording already", which=folder, action="name a new folder"
            ) from None
        except OSError as error:
            raise InputError("cannot write here", which=folder, got=error.strerror) from error
        self._size = 0
        self._append(f"schema: {SCHEMA}\nframes:\n")

    def write(self, frame: Frame) -> Path:
        """Store one frame; returns the path of its image."""
        path = self._folder / f"{self._count:06d}.png"
        image = frame.image if frame.image.ndim == 2 else frame.image[..., ::-1]
        ok, data = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 1])
        if not ok:
            raise InputError("frame cannot be written as PNG", which=path)
        content = data.tobytes()
        entry = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}
        for name in FIELDS:
            value = getattr(frame, name, None)
            if name not in entry and value is not None:
                entry[name] = value
        files.write(path, content)
        self._append(f"- {json.dumps(entry)}\n")
        self._count += 1
        return path

    def close(self) -> None:
        """Finish; may be called twice."""
        self._manifest.close()

    def _append(self, line: str) -> None:
        """A line of the manifest, or none of it where the disk is full."""
        content = line.encode()
        try:
            if self._manifest.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._manifest.seek(self._size)
            self._manifest.truncate()
            raise InputError(
                "cannot be written", which=self._folder / MANIFEST, got=error.strerror
            ) from error
        self._size += len(content)


def read(folder: Path) -> tuple[Entry, ...]:
    """The images of a folder in order. Raises InputError naming file and field; opens no image."""
    if not folder.is_dir():
        raise InputError("no such folder of images", which=folder)
    manifest = folder / MANIFEST
    if not manifest.exists():
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)
        if not images:
            raise InputError(
                "no images", which=folder, expected=f"files {', '.join(IMAGES)} or {MANIFEST}"
            )
        return tuple(Entry(path, number) for number, path in enumerate(images))
    try:
        raw = yaml.load(manifest.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError("not a readable manifest", which=manifest, got=reason) from None
    if isinstance(raw, dict) and isinstance(raw.get("stacks"), list):
        raw = {"schema": SCHEMA, "frames": _of_stacks(raw["stacks"])}
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or set(raw) - {"schema", "frames"}:
        raise InputError(
            "not a manifest of this kind",
            which=manifest,
            expected=f"schema: {SCHEMA} and a list of frames or stacks",
        )
    frames = raw.get("frames")
    if not isinstance(frames, list) or not frames:
        raise InputError("no frames", which=manifest, expected="a list with at least one")
    return tuple(_entry(folder, manifest, k, frame) for k, frame in enumerate(frames))


def load(entry: Entry) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """The image, [H, W] or [H, W, 3] RGB. Raises InputError for one that is damaged or altered."""
    try:
        data = entry.file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError("cannot read image", which=entry.file, got=error) from None
    if entry.sha256 is not None and hashlib.sha256(data).hexdigest() != entry.sha256:
        raise InputError(
            "image differs from the sha256 in the manifest",
            which=entry.file,
            action="restore the file; it was changed after recording",
        )
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) if data else None
    except cv2.error:  # a size that no image has
        image = None
    if image is None or image.dtype not in (np.uint8, np.uint16):
        raise InputError(
            "damaged image", which=entry.file, expected="8 or 16 bit", got=f"{len(data)} bytes"
        )
    if image.ndim == 3:
        code = cv2.COLOR_BGRA2RGB if image.shape[2] == 4 else cv2.COLOR_BGR2RGB
        image = cv2.cvtColor(image, code)
    return image  # type: ignore[return-value]


def _of_stacks(stacks: list[Any]) -> list[Any]:
    """The frames of a recorded scan, which `capture.replay` checks when it is decoded."""
    found: list[Any] = []
    for stack in stacks:
        images = stack.get("images") if isinstance(stack, dict) else None
        found += images if isinstance(images, list) else [None]
    return found


def _entry(folder: Path, manifest: Path, number: int, raw: object) -> Entry:
    where = f"frames[{number}]"
    if not isinstance(raw, dict):
        raise InputError("not a table", which=f"{manifest}: {where}", got=repr(raw)[:40])
    for key, value in raw.items():
        kind = FIELDS.get(key)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if kind is None or not fits:
            raise InputError(
                "unknown key" if kind is None else "wrong type",
                which=f"{manifest}: {where}.{key}",
                expected=", ".join(FIELDS) if kind is None else kind.__name__,
                got=repr(value)[:40],
            )
    name = raw.get("file", "")
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InputError(
            "file of a frame", which=f"{manifest}: {where}.file", expected="a name in the folder",
            got=name or "missing",
        )  # fmt: skip
    if raw.get("clock", "replay") not in get_args(Clock):
        raise InputError(
            "no such clock",
            which=f"{manifest}: {where}.clock",
            expected=", ".join(get_args(Clock)),
            got=raw["clock"],
        )
    return Entry(**{"sequence": number, **raw, "file": folder / name})


# libyaml where it is there: a session of an hour has many thousand lines.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
