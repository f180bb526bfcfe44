"""Examples -> the files of other trainers: Qwen's own fine-tune script and TRL.

Both train on a whole answer, so an example that answers less than its text asks for (a class
without score and grid, because nobody drew the cells) would teach them to stop early. It is fine
for branches, where each line is learnt alone. Such examples are left out unless they are wanted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from forge_station.contract import tasks
from training.data import examples
from training.data.examples import IMAGE, Example
from training.data.loaders.sample import LoadError

Form = Literal["qwen", "trl"]
HELP = {
    "qwen": """The JSON list that Qwen's own fine-tune script takes.

  python -m training.load to-qwen .work/tiles/examples.jsonl --out .work/tiles/qwen-train.json

Rows have `image` and `conversations` (from human and gpt). Paths stay relative to the examples:
register their folder as data_path of the data set. The system turn is left to the script, and
weights, which it does not know, are lost; the report counts them.""",
    "trl": """The JSON lines that TRL takes.

  python -m training.load to-trl .work/tiles/examples.jsonl --out .work/tiles/trl-train.jsonl

Rows have `images`, `prompt` and `completion`; paths are those that FILE was given with. Load with
load_dataset("json") and cast `images` to a list of Image.""",
}


def write(
    file: Path, out: Path, form: Form, split: str, partial: str = "drop", *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the examples of one split; returns the report. The file appears by rename."""
    if out.exists() and not overwrite:
        raise LoadError("something is there already", which=out, action="pass --overwrite")
    rows: list[dict[str, Any]] = []
    dropped = weighted = 0
    for example in examples.read(file, split):
        if partial == "drop" and answers_less(example):
            dropped += 1
            continue
        weighted += example.weight != 1.0
        if form == "qwen":
            rows.append(examples.to_qwen(example))
        else:
            rows.append(examples.to_trl(example, file.parent))
    if not rows:
        raise LoadError("no examples", which=file, expected=f"one or more of split {split}")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = "[\n" + ",\n".join(lines) + "\n]\n" if form == "qwen" else "\n".join(lines) + "\n"
    draft.write_text(text, encoding="utf-8")
    draft.replace(out)
    return {
        "rows": len(rows),
        "partial_left_out": dropped,
        "weights_lost": weighted,
        "out": str(out),
    }


def answers_less(example: Example) -> bool:
    """Whether a surface question asks for a score or a grid that its answer does not have."""
    question, answer = (m.content for m in example.messages[-2:])
    first = question.replace(IMAGE, "").split("\n")[0]
    keys = {branch.key for branch in examples.branches(answer)}
    grid = any(key not in (tasks.CLASS_KEY, tasks.SCORE_KEY) for key in keys)
    return {
        "surface joint": not grid or tasks.SCORE_KEY not in keys,
        "surface grid": not grid,
        "surface score": tasks.SCORE_KEY not in keys,
    }.get(first, False)
