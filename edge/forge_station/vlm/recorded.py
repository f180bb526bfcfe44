"""What a model was shown and asked, and what it answered: recorded questions, and their file.

They calibrate a quantiser with what the station really asks, and tell how far a quantised model is
from the full one. One NPZ: `questions.json`, and the pictures as `N.npy` uint8 [H, W, 3]. It knows
texts and pictures, no check.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.errors import InputError
from forge_station.vlm.decode import Branch, BranchResult, Limits
from forge_station.vlm.model import Trunk, VisionLanguageModel

Image = NDArray[np.uint8]
_INDEX = "questions.json"
_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class Line:
    """One answer line behind a trunk: the key (`A:`) and the text behind it (` hex_nut M8\\n`)."""

    key: str
    answer: str


@dataclass(frozen=True)
class Question:
    """A trunk (`text` with one `<|image_pad|>` for each of `images`) and the lines behind it."""

    text: str
    images: tuple[Image, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class _Entry:
    """A question as it stands in the file; `images` are numbers of pictures."""

    text: str
    images: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class _Index:
    questions: tuple[_Entry, ...]


@dataclass
class _Told:
    """What a trunk has read, and the lines asked behind it."""

    trunk: Trunk
    text: str
    images: tuple[Image, ...]
    lines: list[Line] = field(default_factory=list)


class Recorder(VisionLanguageModel):
    """The given model (its sessions are shared), which remembers every question.

    Of options the most probable one is kept as the answer. Overrun lines are left out.
    """

    def __init__(self, model: VisionLanguageModel) -> None:
        self.__dict__.update(model.__dict__)
        self._told: list[_Told] = []

    def trunk(self, images: Sequence[Image], text: str) -> Trunk:
        trunk = super().trunk(images, text)
        self._told.append(_Told(trunk, text, tuple(images)))
        return trunk

    def extend(self, trunk: Trunk, text: str, images: Sequence[Image] = ()) -> Trunk:
        longer = super().extend(trunk, text, images)
        before = self._of(trunk)
        if before is not None:
            told = _Told(longer, before.text + text, (*before.images, *images))
            self._told.append(told)
        return longer

    def score_lines(
        self,
        trunk: Trunk,
        lines: Mapping[str, Sequence[str]],
        *,
        behind: str = "",
        floor: float = 0.0,
    ) -> dict[str, dict[str, float]]:
        scored = super().score_lines(trunk, lines, behind=behind, floor=floor)
        told = self._of(trunk)
        if told is not None and behind:
            told = _Told(trunk, told.text + behind, told.images)
            self._told.append(told)
        for key, odds in scored.items():
            _note(told, key, f" {max(odds, key=lambda text: odds[text])}")
        return scored

    def decode_branches(
        self, trunk: Trunk, branches: Sequence[Branch], limits: Limits | None = None
    ) -> list[BranchResult]:
        results = super().decode_branches(trunk, branches, limits)
        for result in results:
            if not result.overrun:
                _note(self._of(trunk), result.key, f" {result.text}")
        return results

    def questions(self) -> list[Question]:
        """What was asked since the last call, in order; trunks without a line are left out."""
        told, self._told = self._told, []
        return [Question(t.text, t.images, tuple(t.lines)) for t in told if t.lines]

    def _of(self, trunk: Trunk) -> _Told | None:
        return next((told for told in self._told if told.trunk is trunk), None)


def _note(told: _Told | None, key: str, answer: str) -> None:
    if told is not None:
        told.lines.append(Line(key, f"{answer}\n"))


def save(path: Path, questions: Sequence[Question]) -> None:
    """Write the questions; the same pictures are stored once; the file appears by rename."""
    pictures: dict[bytes, tuple[int, Image]] = {}
    entries = []
    for question in questions:
        numbers = []
        for image in question.images:
            number, _ = pictures.setdefault(image.tobytes(), (len(pictures), image))
            numbers.append(number)
        entries.append(_Entry(question.text, tuple(numbers), question.lines))
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_INDEX, json.dumps(record.write(_Index(tuple(entries)))))
        for number, image in pictures.values():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, image, allow_pickle=False)
            archive.writestr(f"{number}.npy", buffer.getvalue())
    partial.replace(path)


def load(path: Path) -> list[Question]:
    """The questions of a file that `save` wrote. Raises InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > _MAX_BYTES:
                raise ValueError(f"unpacks to more than {_MAX_BYTES >> 30} GB")
            entries = record.read(_Index, json.loads(archive.read(_INDEX))).questions
            used = sorted({number for entry in entries for number in entry.images})
            images = {number: _image(archive.read(f"{number}.npy")) for number in used}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, ContractError) as error:
        raise InputError(
            "recorded questions cannot be read",
            which=path,
            expected="a file that training.questions wrote",
            got=error,
        ) from error
    if not entries:
        raise InputError("no recorded questions", which=path)
    return [Question(e.text, tuple(images[n] for n in e.images), e.lines) for e in entries]


def _image(content: bytes) -> Image:
    image = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"a picture is uint8 [H, W, 3], got {image.dtype} {list(image.shape)}")
    return image
