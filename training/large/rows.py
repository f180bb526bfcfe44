"""Example files -> the rows that the trainers of TRL take, checked before a GPU waits for them.

Rows hold names of pictures; pictures are opened when a batch is made. Checked here: every example
has a picture (a text-only row on one process stops all others under FSDP2), every picture is there,
no example is longer than the limit (a cut one would train on nothing), every word is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from training.data import examples
from training.data.examples import Example, ExampleError
from training.large.branches import Layout, length_of
from training.large.processor import (
    VisionTextProcessor,
    open_pictures,
    picture_sizes,
    token_grid,
)


@dataclass(frozen=True)
class Placed:
    """An example and the folder that its picture names are relative to."""

    example: Example
    folder: Path

    @property
    def pictures(self) -> list[Path]:
        return [self.folder / name for name in self.example.images]


def read_split(files: Sequence[Path], split: str) -> list[Placed]:
    """Examples of one split of all `files`; ExampleError for one without a picture."""
    found = []
    for file in files:
        for example in examples.read(file, split):
            if not example.images:
                raise ExampleError(
                    "a text-only example",
                    which=f"{file}: {example.id}",
                    expected="at least one picture",
                    action="put its text behind a picture; sharded training stops on such a row",
                )
            found.append(Placed(example, file.absolute().parent))
    return found


def by_turn(placed: Iterable[Placed]) -> Iterator[Placed]:
    """One example an assistant turn, each ending in that turn: what the sequential form learns."""
    for one in placed:
        messages = one.example.messages
        ends = [n for n, message in enumerate(messages) if message.role == "assistant"]
        for turn, end in enumerate(ends):
            kept = messages[: end + 1]
            tags = sum(m.content.count(examples.IMAGE) for m in kept if m.role == "user")
            name = one.example.id if len(ends) == 1 else f"{one.example.id}/{turn + 1}"
            part = replace(one.example, id=name, messages=kept, images=one.example.images[:tags])
            yield Placed(part, one.folder)


def require_equal_weights(placed: Iterable[Placed]) -> None:
    """TRL's loss knows no weight of an example: ExampleError rather than silence."""
    for one in placed:
        if one.example.weight != 1.0:
            raise ExampleError(
                "a weighted example in the sequential form",
                which=one.example.id,
                expected="weight 1",
                got=one.example.weight,
                action="train with --layout branches, or repeat the example",
            )


def sequential_length(processor: VisionTextProcessor) -> Callable[[Placed], int]:
    """`length` of `check_lengths` for the sequential form."""

    def length(one: Placed) -> int:
        row = examples.to_trl(one.example, one.folder)
        text = processor.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        grids = [token_grid(processor, size) for size in picture_sizes(one.pictures)]
        return len(ids) + sum(rows * columns - 1 for rows, columns in grids)

    return length


def check_lengths(
    placed: Sequence[Placed], length: Callable[[Placed], int], limit: int, *, quiet: bool = False
) -> int:
    """The longest example in tokens. ExampleError names the first that is above `limit`."""
    longest = 0
    for one in tqdm(placed, desc="check examples", unit="", mininterval=2, disable=quiet):
        tokens = length(one)
        if tokens > limit:
            raise ExampleError(
                "example is too long",
                which=one.example.id,
                expected=f"at most {limit} tokens",
                got=f"{tokens} tokens",
                action="raise --max-length (memory grows with its square under branches), or "
                "make its pictures smaller",
            )
        longest = max(longest, tokens)
    return longest


def branch_length(layout: Layout) -> Callable[[Placed], int]:
    """`length` of `check_lengths` for packed branches."""
    return lambda one: length_of(layout, one.example, one.folder)


def branch_rows(placed: Sequence[Placed]) -> datasets.Dataset:
    """Rows of `BranchCollator`."""
    return datasets.Dataset.from_dict(
        {
            "example": [examples.to_line(one.example) for one in placed],
            "folder": [str(one.folder) for one in placed],
            "images": [[str(path) for path in one.pictures] for one in placed],
        }
    )


def trl_rows(placed: Sequence[Placed], **columns: Sequence[Any]) -> datasets.Dataset:
    """Rows of TRL: images, prompt, completion (made when read) and `columns` as they are."""
    rows = [examples.to_trl(one.example, one.folder) for one in placed]

    def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        chosen = [rows[number] for number in batch["number"]]
        out = {name: list(batch[name]) for name in columns}
        out["images"] = [open_pictures(row["images"]) for row in chosen]
        return out | {name: [row[name] for row in chosen] for name in ("prompt", "completion")}

    table = datasets.Dataset.from_dict({"number": list(range(len(rows))), **columns})
    return table.with_transform(made)
