"""From which size on a defect class is promised: a file, and what it means for rows.

Either `{"crack": 3.0, "dent": 1.2}` in mm, or `{"unit": "px", "curves": {"crack": 8, ...}}` as
`training.calibrate pod` writes it (its a90/95 counts). Defects of other classes always count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_station.contract import tasks
from forge_station.errors import InputError
from training.evaluation.rows import Row

_ALL_CLASSES = "all"


@dataclass(frozen=True)
class Promised:
    """Defect class -> smallest promised size, in mm or in camera pixels on the part."""

    sizes: Mapping[str, float] = field(default_factory=dict)
    unit: Literal["mm", "px"] = "mm"

    def covers(self, row: Row) -> bool:
        """Sound parts, and defects of at least the promised size; a defect without size is not."""
        least = self.sizes.get(row.defect_true or tasks.NORMAL)
        if least is None:
            return True
        size = row.defect_size_mm if self.unit == "mm" else row.defect_size_px
        return size is not None and size >= least


def read(path: Path) -> Promised:
    """Raises InputError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        curves = data.get("curves", data)
        sizes = {
            str(name): float(one["a90_95"] if isinstance(one, dict) else one)
            for name, one in curves.items()
            if name != _ALL_CLASSES
        }
        pixels = "curves" in data and data.get("unit") == "px"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            "promised sizes cannot be read",
            which=path,
            expected='{"crack": 3.0, ...} in mm, or the file of pod with every a90/95',
            got=repr(error),
        ) from error
    return Promised(sizes, "px" if pixels else "mm")
