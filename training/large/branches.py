"""An example as the station decodes it: one trunk, every answer line a branch behind it.

    trunk    system, pictures, facts, `assistant`           computed once, causal
    branch   `front r5:` ` 5,6\\n`                           sees the trunk and itself
    turn two readings and specification behind the trunk    its branches see it as well

The layout is made by the station's own functions (`forge_station.vlm.packing`, `mrope_positions`),
so training and decoding cannot drift apart. Positions restart behind the text a branch hangs on; a
packed line has the loss that it has alone. Key and answer are tokenised apart, as at the station.

Knows no trainer. Masks need an attention that takes them (sdpa, eager), not flash attention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from forge_station.contract import record, tasks
from forge_station.errors import ModelError
from forge_station.vlm.packing import Contexts, pack
from forge_station.vlm.preprocess import mrope_positions
from forge_station.vlm.text import TextCodec
from training.data import conversations, examples
from training.data.examples import IMAGE, Example, ExampleError
from training.large.processor import (
    VisionTextProcessor,
    open_pictures,
    picture_sizes,
    token_grid,
)

IGNORE = -100
NONE_WEIGHT = 0.25
"""Loss weight of an empty grid row: most rows are empty. The station undoes it at read-out, from
`none_weight` of the training card."""


@dataclass(frozen=True)
class Packed:
    """One packed sequence of S tokens.

    `ids`, `target` int64 [S] (target: the token that position predicts, IGNORE where none);
    `weight` float32 [S]; `positions` int64 [3, S]; `sees` bool [S, S].
    """

    ids: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]
    positions: NDArray[np.int64]
    sees: NDArray[np.bool_]


@dataclass(frozen=True)
class Line:
    """A branch to be packed. `parent`: -1 for the trunk, else the segment that it continues."""

    ids: tuple[int, ...]
    target: tuple[int, ...]
    weight: float
    parent: int = -1


class Layout:
    """Examples -> packed sequences with one tokenizer."""

    def __init__(self, processor: VisionTextProcessor) -> None:
        self.processor = processor
        self.codec = TextCodec(processor.tokenizer.backend_tokenizer)

    def encode(self, text: str, which: str) -> tuple[int, ...]:
        """Token ids as the station has them; ExampleError for a word the tokenizer lacks."""
        try:
            return self.codec.encode_key(text)
        except ModelError as error:
            raise ExampleError(
                "example cannot be written in tokens", which=which, got=error
            ) from error

    def pack(self, example: Example, grids: Sequence[tuple[int, int]]) -> Packed:
        """`grids`: (rows, columns) in language tokens of every picture in order."""
        trunk_text, turns = _turns(example)
        trunk: list[int] = []
        image_id = self.processor.image_token_id
        pieces = trunk_text.split(tasks.IMAGE_TOKEN)
        for number, piece in enumerate(pieces):
            if number:
                rows, columns = grids[number - 1]
                trunk += [image_id] * (rows * columns)
            trunk += self.encode(piece, example.id)
        ids = np.array(trunk, np.int64)
        positions, position = mrope_positions(ids, image_id, grids)
        lines = self._lines(example, turns)
        packed = pack(
            Contexts.root(len(trunk), position),
            [0] * len(lines),
            [line.ids for line in lines],
            [line.parent for line in lines],
        )
        length = len(trunk) + len(packed.ids)
        sees = np.zeros((length, length), np.bool_)
        sees[: len(trunk), : len(trunk)] = np.tri(len(trunk), dtype=np.bool_)
        sees[len(trunk) :] = packed.bias[0, 0] == 0
        target = np.full(length, IGNORE, np.int64)
        target[len(trunk) :] = [token for line in lines for token in line.target]
        weight = np.zeros(length, np.float32)
        weight[len(trunk) :] = np.repeat(
            [line.weight for line in lines], [len(x.ids) for x in lines]
        )
        weight[target == IGNORE] = 0
        return Packed(
            np.concatenate([ids, packed.ids]),
            target,
            weight,
            np.concatenate([positions, packed.positions[:, 0]], 1),
            sees,
        )

    def _lines(self, example: Example, turns: Sequence[tuple[str, str]]) -> list[Line]:
        """Branches of every turn. `turns`: (text since the trunk's end, answer)."""
        lines: list[Line] = []
        context = -1
        for before, answer in turns:
            if before:
                ids = self.encode(before, example.id)
                lines.append(Line(ids, (IGNORE,) * len(ids), 0.0, context))
                context = len(lines) - 1
            for branch in conversations.expanded(examples.branches(answer)):
                empty_row = branch.answer == tasks.NONE and conversations.is_row(branch.key)
                weight = example.weight * (NONE_WEIGHT if empty_row else 1.0)
                lines.append(self._line(branch, weight, context, example.id))
        return lines

    def _line(self, branch: examples.Branch, weight: float, parent: int, which: str) -> Line:
        """`none` ends itself, other answers end in a newline: what the station's grammars read."""
        ending = "" if branch.answer == tasks.NONE else "\n"
        key = self.encode(branch.key, which)
        answer = self.encode(f" {branch.answer}{ending}", which)
        ids = (*key, *answer[:-1])
        return Line(ids, (IGNORE,) * (len(key) - 1) + answer, weight, parent)


def _turns(example: Example) -> tuple[str, list[tuple[str, str]]]:
    """Trunk text with image tokens, and (text between, answer) of every assistant turn."""
    text = ""
    turns: list[tuple[str, str]] = []
    for message in example.messages:
        if message.role == "assistant":
            turns.append((text, message.content.strip()))
            text = f"{message.content.strip()}\n<|im_end|>\n"
        else:
            content = message.content.replace(
                IMAGE, f"{tasks.IMAGE_OPEN}{tasks.IMAGE_TOKEN}{tasks.IMAGE_CLOSE}"
            )
            text += f"<|im_start|>{message.role}\n{content}<|im_end|>\n"
            if message.role == "user":
                text += "<|im_start|>assistant\n"
    trunk = turns[0][0]
    turns[0] = ("", turns[0][1])
    if any(tasks.IMAGE_TOKEN in before for before, _ in turns):
        raise ExampleError(
            "a picture in a later turn cannot be laid out as branches",
            which=example.id,
            expected="all pictures in the first user turn",
            action="move the picture, or train with --layout sequential",
        )
    return trunk, turns


def length_of(layout: Layout, example: Example, folder: Path) -> int:
    """Tokens of a packed example; reads the headers of its pictures only."""
    sizes = picture_sizes([folder / name for name in example.images])
    grids = [token_grid(layout.processor, size) for size in sizes]
    return len(layout.pack(example, grids).ids)


def pixels(
    processor: VisionTextProcessor, pictures: Sequence[Image.Image]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures -> pixel_values float32 [patches, 1176], image_grid_thw int64 [pictures, 3]."""
    made = processor.image_processor(images=list(pictures), return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


class BranchCollator:
    """Rows (`example`: JSON line, `folder`) -> a right-padded batch of packed sequences.

    input_ids, shift_labels int64 [B, T]; weight float32 [B, T]; attention_mask bool [B, 1, T, T]
    (True: sees); position_ids int64 [B, 3, T]; pixel_values, image_grid_thw of all pictures.
    """

    def __init__(self, processor: VisionTextProcessor) -> None:
        self.layout = Layout(processor)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        packed, values, grids = [], [], []
        processor = self.layout.processor
        merge = processor.image_processor.merge_size
        for row in rows:
            example = record.read(Example, json.loads(row["example"]))
            pictures = open_pictures([Path(row["folder"]) / name for name in example.images])
            value, grid = pixels(processor, pictures)
            shape = [(int(h) // merge, int(w) // merge) for _, h, w in grid.tolist()]
            packed.append(self.layout.pack(example, shape))
            values.append(value)
            grids.append(grid)
        return {
            **pad(packed, processor.tokenizer.pad_token_id),
            "pixel_values": torch.cat(values),
            "image_grid_thw": torch.cat(grids),
        }


def pad(packed: Sequence[Packed], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-pad to the longest; padding sees itself, so that no row of the mask is empty."""
    length = max(len(one.ids) for one in packed)
    full = partial(np.full, (len(packed), length))
    ids, target = full(pad_id, dtype=np.int64), full(IGNORE, dtype=np.int64)
    weight = full(0, dtype=np.float32)
    positions = np.zeros((len(packed), 3, length), np.int64)
    sees = np.zeros((len(packed), 1, length, length), np.bool_)
    sees[:] = np.eye(length, dtype=np.bool_)
    for n, one in enumerate(packed):
        size = len(one.ids)
        ids[n, :size], target[n, :size], weight[n, :size] = one.ids, one.target, one.weight
        positions[n, :, :size] = one.positions
        sees[n, 0, :size, :size] = one.sees
    arrays = {
        "input_ids": ids,
        "shift_labels": target,
        "weight": weight,
        "attention_mask": sees,
        "position_ids": positions,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
