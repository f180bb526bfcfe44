"""One example of training: a conversation about pictures, as JSON lines.

    {"id": "tile-0001", "images": ["images/tile-0001.png"],
     "messages": [{"role": "system", "content": "Inspect the parts."},
                  {"role": "user", "content": "<image>surface joint\\nmagnetic_tile"},
                  {"role": "assistant", "content": "class: crack\\nscore: 6/10\\nr5: 5,6"}],
     "source": "magnetic_tile", "group": "exp3_num_57", "split": "train", "weight": 1.0}

Every loader writes this format and every trainer reads it. `<image>` stands for the next picture,
conditioning pictures first and the judged one last. An assistant turn is lines of `key: answer`.
Read as a whole it is the sequential form that TRL and Qwen's own script take (`to_trl`, `to_qwen`);
read line by line, every line is a branch behind the turns before it, which is how the station
decodes (`branches`). Paths are relative to the file. `group` names what must not be divided between
splits: the physical part, the capture run, the photo that crops come from.

Knows no task, no tokenizer and no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError

IMAGE = "<image>"
FILE = "examples.jsonl"
Role = Literal["system", "user", "assistant"]
SPLITS = ("train", "val", "test")


class ExampleError(ContractError):
    """An example that no trainer can use."""


@dataclass(frozen=True)
class Message:
    """One turn; `content` holds `<image>` where a picture stands."""

    role: Role
    content: str


@dataclass(frozen=True)
class Example:
    """One conversation. See the module for its fields; `weight` scales its loss."""

    id: str
    messages: tuple[Message, ...]
    images: tuple[str, ...] = ()
    source: str = ""
    group: str = ""
    split: Literal["train", "val", "test"] = "train"
    weight: float = 1.0

    def __post_init__(self) -> None:
        tags = sum(m.content.count(IMAGE) for m in self.messages if m.role == "user")
        if tags != len(self.images):
            raise ExampleError(
                "pictures and <image> tags differ",
                which=self.id,
                expected=f"{len(self.images)} tags in user turns",
                got=str(tags),
            )
        if any(IMAGE in m.content for m in self.messages if m.role != "user"):
            raise ExampleError("an <image> tag outside a user turn", which=self.id)
        roles = [m.role for m in self.messages if m.role != "system"]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            raise ExampleError(
                "turns do not alternate",
                which=self.id,
                expected="system?, then user, assistant, ...",
                got=", ".join(m.role for m in self.messages),
            )
        if any(not m.content.strip() for m in self.messages if m.role == "assistant"):
            raise ExampleError("an assistant turn is empty", which=self.id)


@dataclass(frozen=True)
class Branch:
    """One answer line: `key` ends in a colon, `answer` has no newline."""

    key: str
    answer: str


def branches(content: str) -> tuple[Branch, ...]:
    """An assistant turn as keyed lines. ExampleError for a line without a key."""
    found = []
    for line in content.strip().split("\n"):
        key, colon, answer = line.partition(":")
        if not colon or not key.strip() or not answer.strip():
            raise ExampleError(
                "an answer line has no key", which=line, expected="key: answer", got=line
            )
        found.append(Branch(f"{key.strip()}:", answer.strip()))
    return tuple(found)


def to_trl(example: Example, folder: Path) -> dict[str, Any]:
    """A row for TRL: `images` (paths) and `prompt` / `completion` with image blocks in place.

    The last assistant turn is the completion.
    """
    rows = [
        {"role": m.role, "content": _blocks(m.content) if m.role == "user" else m.content}
        for m in example.messages
    ]
    images = [str(folder / name) for name in example.images]
    return {"images": images, "prompt": rows[:-1], "completion": rows[-1:]}


def to_qwen(example: Example) -> dict[str, Any]:
    """A row for Qwen's own fine-tune script: `image` and `conversations` from human and gpt."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [
        {"from": names[m.role], "value": m.content} for m in example.messages if m.role != "system"
    ]
    return {"image": list(example.images), "conversations": turns}


def _blocks(content: str) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            out.append({"type": "image"})
        if text:
            out.append({"type": "text", "text": text})
    return out


def write(path: Path, examples: Sequence[Example]) -> None:
    """Write JSON lines; the file appears by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{to_line(example)}\n" for example in examples)
    partial.replace(path)


def to_line(example: Example) -> str:
    """One line of JSON; defaults are left out."""
    data: dict[str, Any] = {
        "id": example.id,
        "images": list(example.images),
        "messages": [{"role": m.role, "content": m.content} for m in example.messages],
        "source": example.source,
        "group": example.group,
        "split": example.split,
        "weight": example.weight,
    }
    defaults: Mapping[str, Any] = {"images": [], "source": "", "group": "", "weight": 1.0}
    kept = {key: value for key, value in data.items() if value != defaults.get(key)}
    return json.dumps(kept, ensure_ascii=False)


def read(path: Path, split: str | None = None) -> Iterator[Example]:
    """Examples of a file, one at a time; `split` keeps one of train, val, test.

    Raises ExampleError with file and line for the first that cannot be used.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise ExampleError("example file cannot be read", which=path, got=error) from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                example = record.read(Example, json.loads(line))
            except ContractError as error:
                text = "; ".join(str(fault) for fault in error.faults) or str(error)
                raise ExampleError("not an example", which=where, got=text) from error
            except (ValueError, RecursionError) as error:
                raise ExampleError("not a line of JSON", which=where, got=error) from error
            if split is None or example.split == split:
                yield example
