"""The surface conversation of a photo, shared by the loaders that know where a defect is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from forge_station.contract.views import PHOTO
from training.data import conversations
from training.data.examples import Message


def photo_surface(part: str, defect: str, cells: NDArray[np.bool_]) -> tuple[Message, ...]:
    """No measured size, one grid bool [16, 16] over the photo, score by its share of cells."""
    score = tasks.surface_score(float(cells.mean()))
    return conversations.surface(tasks.photo_facts(part), defect, score, {PHOTO: cells})
