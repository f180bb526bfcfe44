"""Photo examples -> augmented pictures with their answers, in batches for the nano model.

Reads the example format (`training.data.examples`): one photo a conversation, one question, keyed
answer lines. A line's photos are few, so every draw is varied: light, noise, shifts and, where the
line allows it, flips; photos with fixed places are also put together anew from the quarters of
several. Labels follow the picture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract import grid, grid_text, tasks
from forge_station.contract.manifest import PhotoInput
from forge_station.contract.views import PHOTO
from forge_station.geometry import photo
from training.data import conversations, examples
from training.data.examples import IMAGE, Example, ExampleError
from training.nano import model as nano
from training.nano import pack

ByteImage = NDArray[np.uint8]
SIDE = tasks.GRID_ROWS
_ROW = re.compile(rf"{PHOTO} r(\d+):")
_MARK = re.compile(r"([A-Z]):")
_CLASS_WEIGHT, _SCORE_WEIGHT = 2.0, 0.5
_EMPTY_ROWS = 5


@dataclass(frozen=True)
class PhotoSample:
    """One photo, uint8 [H, W, 3] RGB at the model's size, with the question and its answers."""

    id: str
    image: ByteImage
    facts: str
    answers: Mapping[str, str]
    """Key -> answer of every line that is no grid row: `class:`, `score:`, `A:` ..."""
    cells: NDArray[np.bool_] | None = None
    """bool [16, 16]; None where no grid is asked for."""

    @property
    def defect(self) -> str | None:
        return self.answers.get(tasks.CLASS_KEY)

    @property
    def places(self) -> dict[str, str]:
        """Mark -> what is there, in the order of the marks."""
        found = ((_MARK.fullmatch(key), answer) for key, answer in self.answers.items())
        return dict(sorted((match[1], answer) for match, answer in found if match))


@dataclass(frozen=True)
class Variation:
    """What may happen to a photo of this line without changing what is on it."""

    flips: bool = True
    """Mirrored left-right and up-down. Places are mirrored with their marks, see `places`."""
    turns: bool = False
    """Quarter turns: only where the surface has no direction and the picture is square."""
    tilt_degrees: float = 2.0
    zoom: float = 0.06
    """Scaled by up to e to the power of this, up and down."""
    shift: float = 0.02
    """Shifted by up to this share of the picture."""
    light: float = 0.25
    """Spread of brightness and contrast."""
    noise: float = 4.0
    """Largest standard deviation of the noise, grey levels."""
    places: tuple[int, int] | None = None
    """Rows and columns in which the marks stand, in reading order; allows flips and quarters."""


def read_samples(path: Path, split: str, size: tuple[int, int]) -> list[PhotoSample]:
    """Samples of one split of an examples file, pictures stretched to `size` (height, width)."""
    found = [
        _sample(example, path.parent, size)
        for example in examples.read(path, None if split == "all" else split)
    ]
    if not found:
        raise ExampleError("no examples of this split", which=f"{path}, {split}")
    return found


def _sample(example: Example, folder: Path, size: tuple[int, int]) -> PhotoSample:
    turns = [message for message in example.messages if message.role != "system"]
    if len(example.images) != 1 or len(turns) != 2:
        raise ExampleError(
            "not a photo example",
            which=example.id,
            expected="one picture, one question, one answer",
            got=f"{len(example.images)} pictures, {len(turns) // 2} questions",
        )
    answers: dict[str, str] = {}
    cells: NDArray[np.bool_] | None = None
    for line in conversations.expanded(examples.branches(turns[1].content)):
        row = _ROW.fullmatch(line.key)
        if row is None:
            answers[line.key] = line.answer
            continue
        cells = np.zeros((SIDE, SIDE), bool) if cells is None else cells
        for column in grid_text.parse_columns(line.answer):
            cells[int(row[1]) - 1, column] = True
    image = photo.resized(photo.read_photo(folder / example.images[0]), size)
    return PhotoSample(example.id, image, turns[0].content.replace(IMAGE, ""), answers, cells)


def texts_of(samples: Sequence[PhotoSample]) -> list[str]:
    """Every text of the samples: what the vocabulary must hold."""
    rows = [PHOTO] if any(sample.cells is not None for sample in samples) else []
    lines = {f"{key} {text}" for sample in samples for key, text in sample.answers.items()}
    return [*rows, *sorted({sample.facts for sample in samples}), *sorted(lines)]


def varied(
    sample: PhotoSample,
    others: Sequence[PhotoSample],
    variation: Variation,
    rng: np.random.Generator,
) -> PhotoSample:
    """A new sample from `sample`; `others` lend quarters where the places allow it."""
    image, cells = sample.image, sample.cells
    answers = dict(sample.answers)
    places = sample.places
    if places and variation.places and rng.random() < 0.7:
        image, places = _composed(sample, others, variation.places, rng)
    if variation.turns and image.shape[0] == image.shape[1]:
        times = int(rng.integers(4))
        image = np.rot90(image, times)
        cells = None if cells is None else np.rot90(cells, times)
    for axis in (0, 1):
        if variation.flips and rng.random() < 0.5 and (not places or variation.places):
            image = np.flip(image, axis)
            cells = None if cells is None else np.flip(cells, axis)
            if places and variation.places:
                places = _mirrored(places, variation.places, axis)
    image, cells = _moved(image, cells, variation, rng)
    answers |= {tasks.mark_key(mark): what for mark, what in places.items()}
    lit = _lit(np.ascontiguousarray(image), variation, rng)
    return PhotoSample(sample.id, lit, sample.facts, answers, cells)


def _composed(
    sample: PhotoSample,
    others: Sequence[PhotoSample],
    places: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[ByteImage, dict[str, str]]:
    """Every place cut from a photo of its own: what stands at one place says nothing of others."""
    rows, columns = places
    image, found = sample.image.copy(), {}
    height, width = image.shape[:2]
    for number, mark in enumerate(sample.places):
        row, column = divmod(number, columns)
        box = (
            slice(height * row // rows, height * (row + 1) // rows),
            slice(width * column // columns, width * (column + 1) // columns),
        )
        donor = others[int(rng.integers(len(others)))]
        image[box] = donor.image[box]
        found[mark] = donor.places[mark]
    return image, found


def _mirrored(places: dict[str, str], layout: tuple[int, int], axis: int) -> dict[str, str]:
    marks = np.array(list(places)).reshape(layout)
    return {
        str(mark): places[str(source)]
        for mark, source in zip(marks.flat, np.flip(marks, axis).flat, strict=True)
    }


def _moved(
    image: ByteImage,
    cells: NDArray[np.bool_] | None,
    variation: Variation,
    rng: np.random.Generator,
) -> tuple[ByteImage, NDArray[np.bool_] | None]:
    """Turned, scaled and shifted a little; a cell is defective where more than half of it is."""
    height, width = image.shape[:2]
    angle = float(rng.uniform(-1, 1)) * variation.tilt_degrees
    scale = float(np.exp(rng.uniform(-1, 1) * variation.zoom))
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
    matrix[:, 2] = matrix[:, 2] + rng.uniform(-1, 1, 2) * variation.shift * (width, height)
    moved = cv2.warpAffine(
        np.ascontiguousarray(image), matrix, (width, height), borderMode=cv2.BORDER_REPLICATE
    )
    if cells is None or not cells.any():
        return np.asarray(moved, np.uint8), cells
    mask = cv2.resize(cells.astype(np.float32), (width, height), interpolation=cv2.INTER_NEAREST)
    mask = cv2.warpAffine(mask, matrix, (width, height))
    found = grid.from_mask(np.asarray(mask.clip(0, 1), np.float32), threshold=0.5).cells
    return np.asarray(moved, np.uint8), found if found.any() else cells


def _lit(image: ByteImage, variation: Variation, rng: np.random.Generator) -> ByteImage:
    """Other contrast, brightness, colour balance and noise."""
    values = image.astype(np.float32)
    gain = np.exp(rng.normal(0, variation.light))
    tint = np.exp(rng.normal(0, variation.light / 4, 3)) if _coloured(image) else 1.0
    middle = values.mean()
    contrast = np.exp(rng.normal(0, variation.light / 2))
    values = ((values - middle) * contrast + middle) * gain * tint
    noise = rng.standard_normal(image.shape[:2], np.float32) * rng.uniform(0, variation.noise)
    return np.clip(values + noise[..., None], 0, 255).astype(np.uint8)


def _coloured(image: ByteImage) -> bool:
    return bool((image[..., 0] != image[..., 2]).any())


@dataclass
class PhotoSet:
    """Training samples of a line, drawn so that rare classes are seen often enough."""

    samples: Sequence[PhotoSample]
    variation: Variation
    balance: float = 0.5
    """A class of share p is drawn with a share that goes as p ** (1 - balance)."""
    chances: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        kinds = [sample.defect or "" for sample in self.samples]
        counts = Counter(kinds)
        weights = np.array([counts[kind] ** -self.balance for kind in kinds])
        self.chances = weights / weights.sum()

    def draw(self, count: int, rng: np.random.Generator) -> list[PhotoSample]:
        """`count` varied samples."""
        chosen = rng.choice(len(self.samples), count, p=self.chances)
        return [varied(self.samples[i], self.samples, self.variation, rng) for i in chosen]


def packed(
    sample: PhotoSample, encoder: nano.Encoder, rng: np.random.Generator | None = None
) -> pack.Packed:
    """The conversation as the station decodes it: one branch an answer line, sixteen a grid.

    With `rng` only some of the empty rows are taken, whose weights stand for the rest: training.
    """
    sequence = pack.Packed(encoder=encoder)
    height, width = sample.image.shape[:2]
    start = sequence.add_trunk(tasks.TRUNK_OPEN, (height, width), sample.facts + tasks.ASSISTANT)
    weights = {tasks.CLASS_KEY: _CLASS_WEIGHT, tasks.SCORE_KEY: _SCORE_WEIGHT}
    for key, answer in sample.answers.items():
        sequence.add_branch(key, answer, start, weight=weights.get(key, 1.0))
    if sample.cells is not None:
        filled = sample.cells.any(1)
        empty = np.flatnonzero(~filled)
        kept = empty if rng is None else rng.permutation(empty)[:_EMPTY_ROWS]
        share = len(empty) / max(1, len(kept))
        for row in (*np.flatnonzero(filled).tolist(), *kept.tolist()):
            columns = np.flatnonzero(sample.cells[row]).tolist()
            weight = 1.0 if columns else pack.NONE_WEIGHT * share
            key = tasks.row_key(PHOTO, row)
            sequence.add_branch(key, tasks.row_text(columns), start, weight=weight)
    return sequence


def images_of(samples: Sequence[PhotoSample], wanted: PhotoInput) -> ByteImage:
    """uint8 [B, H, W, 3] with the channels that the model takes."""
    return np.stack([photo.with_channels(sample.image, wanted) for sample in samples])
