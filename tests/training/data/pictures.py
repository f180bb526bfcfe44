"""Pictures that differ from each other, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Run = Callable[..., dict[str, Any]]
"""The fixture `run`: words of the command -> its JSON."""


def picture(path: Path, seed: int, size: tuple[int, int] = (48, 64)) -> Path:
    """A picture (height, width) of smooth random blobs; every seed looks different."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (9, 9), np.uint8)
    image = Image.fromarray(noise).resize(size[::-1], Image.Resampling.BICUBIC)
    image.save(path, quality=95)
    return path
