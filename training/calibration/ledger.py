"""The ledger of looks of a certification set: `forge_station.assurance.looks`, for its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forge_station.assurance import looks
from forge_station.assurance.error import AssuranceError
from forge_station.assurance.looks import Look, append, number
from training.calibration.error import CalibrationError
from training.calibration.parts import Part

__all__ = ["Look", "append", "key", "names", "number", "read"]


def names(parts: Iterable[Part]) -> tuple[str, ...]:
    return looks.names(part.id for part in parts)


def key(words: Sequence[str], parts: Iterable[Part]) -> str:
    """Digest of a look: `words` of bundle and claim, and every part with its truth and scores."""
    lines = sorted(f"{p.id} {p.defective} {p.passed} {sorted(p.log_odds.items())}" for p in parts)
    return looks.key([*words, *lines])


def read(path: Path) -> list[Look]:
    """All looks; none when the file does not exist. Raises CalibrationError for a damaged one."""
    try:
        return looks.read(path)
    except AssuranceError as error:
        raise CalibrationError(
            error.what, which=error.which, got=error.got, action=error.action
        ) from error
