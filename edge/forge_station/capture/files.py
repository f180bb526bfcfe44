"""Writes files whole or not at all: readers and full disks never see half of one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError


def write(path: Path, content: bytes) -> None:
    """Write beside the file, then rename; makes the folder. Raises InputError, e.g. disk full."""
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        raise InputError("cannot be written", which=path, got=error.strerror) from error


def write_picture(
    path: Path, image: NDArray[np.uint8] | NDArray[np.uint16], compression: int = 3
) -> None:
    """Grey or BGR, in the format that the name ends in. compression: of PNG, 0 to 9."""
    try:
        ok, data = cv2.imencode(path.suffix, image, [cv2.IMWRITE_PNG_COMPRESSION, compression])
    except cv2.error:
        ok, data = False, np.empty(0, np.uint8)
    if not ok:
        raise InputError("a picture cannot be stored so", which=path, expected=".png or .jpg")
    write(path, data.tobytes())
