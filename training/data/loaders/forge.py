"""FORGE from a local copy of its Hugging Face data set -> the benchmark's questions and letters.

The names of its columns are not published. They are guessed from common ones and can be given; the
error lists what was found. Configurations begin with the task: task1 WORKVERI (which part does not
belong), task2 SURFINSP (two-part answer), task3 ASSYVERI.

`benchmark` text asks as the data set does and answers `answer: B`, or `Part 1: No` and `Part 2: B`.
`station` text asks as the station does, where the label allows: the class of a surface; the part at
every mark, if a column lists them, and then the letter in turn two.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from forge_station.contract import tasks
from forge_station.contract.views import MARKS
from training.data import conversations
from training.data.examples import IMAGE, Message
from training.data.loaders.sample import (
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    Sample,
    class_name,
    inside,
    part_name,
    word,
)

GUESSES: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "prompt", "query", "instruction", "problem", "text"),
    "answer": ("answer", "gt_answer", "ground_truth", "gt", "label", "solution", "target"),
    "image": ("image", "images", "picture", "three_view", "img", "image_path", "image_file"),
    "options": ("options", "choices", "candidates"),
    "id": ("id", "case_id", "sample_id", "question_id", "index", "idx"),
    "group": ("scene_id", "group", "sample_group"),
    "scenario": ("scenario", "category", "product", "family"),
    "part": ("part", "workpiece", "object"),
    "parts": ("parts", "workpieces", "objects"),
}
REQUIRED = ("question", "answer", "image")

HELP = """The FORGE data set from a folder on disk; nothing is fetched.

  python -m training.load forge data/forge --config task1_three_view --out .work/forge1
  python -m training.load forge data/forge --config task2_three_view --text station \\
      --columns question=prompt,answer=gt,image=three_view --out .work/forge2

FOLDER is the downloaded data set (with its README or a folder a configuration), or what
save_to_disk wrote. Roles of columns: question, answer, image (needed); options, id, group,
scenario, part, parts. Without --columns they are guessed by name; the report says how. What `group`
names is never divided: --columns group=scenario,... gives the cross-scenario protocol."""

Task = Literal["letter", "surface"]


@dataclass(frozen=True)
class Row:
    """One row by role; `images` are the pictures in order, the judged one last."""

    values: Mapping[str, Any]
    images: tuple[Picture, ...]

    def text(self, role: str) -> str:
        """A text; LoadError if the column is empty."""
        value = self.values.get(role)
        if value is None or not str(value).strip():
            raise LoadError("nothing in a column", which=role, expected="a text")
        return str(value).strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="local copy of the data set")
    add("--config", required=True, help="configuration, e.g. task1_three_view")
    add("--part-split", default="train", metavar="NAME", help="split of the data set (train)")
    add("--columns", default="", help="role=column,... where the guess is wrong")
    add("--text", choices=["benchmark", "station"], default="benchmark")
    add("--task", choices=["letter", "surface"], help="default: surface for task2..., else letter")


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    if grouping.pattern is not None:
        raise LoadError("rows have no path", which="--group", action="use --columns group=NAME")
    task: Task = args.task or ("surface" if args.config.startswith("task2") else "letter")
    columns, rows = open_rows(args.folder, args.config, args.part_split)
    mapping = columns_of(columns, parse_columns(args.columns))
    read = tqdm(rows, desc="read", unit="row", disable=args.quiet)
    return load(args.folder, args.config, task, mapping, read, problems, text=args.text)


def load(
    folder: Path,
    config: str,
    task: Task,
    mapping: Mapping[str, str],
    rows: Iterable[Mapping[str, Any]],
    problems: Problems,
    *,
    text: str = "benchmark",
) -> Loaded:
    """Examples of rows (column -> value). `mapping`: role -> column."""
    samples: list[Sample] = []
    for number, raw in enumerate(rows):
        with problems.of(f"{config} row {number}"):
            values = {role: raw.get(column) for role, column in mapping.items()}
            row = Row(values, pictures_of(values["image"], folder, f"{config} row {number}"))
            answer = surface_answer(row) if task == "surface" else letter_answer(row)
            make = station_text if text == "station" else benchmark_text
            given = values.get("id")
            name = word(str(number if given is None else given)) or str(number)
            scenario = str(values.get("scenario") or "").strip()
            samples.append(
                Sample(
                    id=f"{config}-{name}",
                    pictures=row.images,
                    messages=make(row, task, answer),
                    group=str(values.get("group") or f"{config} {name}"),
                    labels=(answer, scenario) if scenario else (answer,),
                    clean=answer in (tasks.NORMAL, tasks.NONE),
                )
            )
    return Loaded("forge", samples, {"config": config, "columns": dict(mapping), "text": text})


def letter_answer(row: Row) -> str:
    """The letter of an answer as the data writes it: `B`, `(b)`, `Answer: B`, an option's text."""
    text = row.text("answer")
    if re.fullmatch(r"\(?[A-Fa-f][).]?", text):
        return text.strip("().").upper()
    letter = tasks.parse_letter(text, tasks.LETTER_OPTIONS)
    if letter:
        return letter
    options = _options(row)
    if text in options.values():
        return next(key for key, value in options.items() if value == text)
    raise LoadError(
        "not an answer", which="answer", expected="a letter A..F or the text of an option", got=text
    )


def surface_answer(row: Row) -> str:
    """The class of a two-part answer, a letter A..D, `Yes` (normal), or a class name."""
    text = row.text("answer")
    found, _ = tasks.parse_surfinsp(text)
    lower = text.lower().strip(" .")
    if found:
        return found
    if lower in ("yes", *tasks.SURFACE_CLASSES):
        return tasks.NORMAL if lower == "yes" else lower
    letter = re.fullmatch(r"(?:no\W+)?\(?([a-d])\)?\W*", lower)
    if letter:
        return tasks.DEFECT_CLASSES["abcd".index(letter[1])]
    raise LoadError(
        "not an answer", which="answer", got=text,
        expected="Part 1: Yes|No, Part 2: A..D, or a class",
    )  # fmt: skip


def benchmark_text(row: Row, task: Task, answer: str) -> tuple[Message, ...]:
    """The data set's own question, and the answer in the benchmark's lines."""
    question = row.text("question").replace(IMAGE, "").strip()
    options = _options(row)
    if options and not all(value in question for value in options.values()):
        question += "".join(f"\n{letter}. {value}" for letter, value in options.items())
    if task == "letter":
        reply = f"{tasks.ANSWER_KEY} {answer}"
    elif answer == tasks.NORMAL:
        reply = "Part 1: Yes"
    else:
        reply = f"Part 1: No\nPart 2: {'ABCD'[tasks.DEFECT_CLASSES.index(answer)]}"
    return (
        Message("system", tasks.SYSTEM_PROMPT),
        Message("user", IMAGE * len(row.images) + question),
        Message("assistant", reply),
    )


def station_text(row: Row, task: Task, answer: str) -> tuple[Message, ...]:
    """The station's question; LoadError where the label does not say what it asks for."""
    before = IMAGE * (len(row.images) - 1)
    if task == "surface":
        part = part_name(str(row.values.get("part") or "part").replace("_", " ").strip())
        facts = before + tasks.photo_facts(part)
        return conversations.surface(facts, class_name(answer), None, None)
    parts = row.values.get("parts")
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise LoadError(
            "the label does not say which part stands at each mark", which="parts",
            expected="a list, --columns parts=NAME", action="use --text benchmark",
        )  # fmt: skip
    if len(parts) > len(MARKS):
        raise LoadError("too many parts", which="parts", expected=len(MARKS), got=len(parts))
    readings = {mark: part_name(str(p)) for mark, p in zip(MARKS, parts, strict=False)}
    question = tasks.judge_text("batch", None)
    facts = before + tasks.positions_facts(list(readings))
    return conversations.sheet(facts, readings, (question, f"{tasks.ANSWER_KEY} {answer}"))


def pictures_of(value: Any, folder: Path, which: str) -> tuple[Picture, ...]:
    """The pictures of a row: bytes, a path below the data set, or a list of them."""
    if isinstance(value, (list, tuple)):
        found = tuple(p for item in value for p in pictures_of(item, folder, which))
        if not found:
            raise LoadError("no picture", which="image")
        return found
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return (Picture(bytes(value["bytes"]), which=which),)
        value = value.get("path")
    if isinstance(value, bytes):
        return (Picture(value, which=which),)
    if isinstance(value, str):
        path = Path(value)
        if path.is_absolute() and path.resolve().is_relative_to(folder.resolve()):
            value = str(path.resolve().relative_to(folder.resolve()))  # as `datasets` resolves it
        return (Picture(inside(folder, value, "image"), which=value),)
    raise LoadError(
        "no picture", which="image", expected="an image column", got=type(value).__name__
    )


def parse_columns(text: str) -> dict[str, str]:
    """`question=prompt,answer=gt` -> role -> column."""
    out = {}
    for item in filter(None, text.split(",")):
        role, equals, column = item.partition("=")
        if not equals or role.strip() not in GUESSES or not column.strip():
            raise LoadError(
                "not a column", which="--columns", got=item,
                expected=f"role=column with a role of {', '.join(GUESSES)}",
            )  # fmt: skip
        out[role.strip()] = column.strip()
    return out


def columns_of(found: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Role -> column: as given, else by name. LoadError lists the columns when one is missing."""
    lower = {name.lower(): name for name in found}
    mapping = dict(given)
    for role, names in GUESSES.items():
        if role not in mapping:
            guess = next((lower[name] for name in names if name in lower), None)
            if guess is not None and guess not in mapping.values():
                mapping[role] = guess
    wrong = [column for column in mapping.values() if column not in found]
    missing = [role for role in REQUIRED if role not in mapping]
    if wrong or missing:
        raise LoadError(
            "columns not found", which=", ".join(wrong or missing),
            expected=f"some of the columns {', '.join(found)}",
            action="say which is which: --columns question=NAME,answer=NAME,image=NAME",
        )  # fmt: skip
    return mapping


def open_rows(folder: Path, config: str, split: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Column names and rows with undecoded pictures. Reads the folder only, and copies nothing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets  # here, since it takes seconds and nothing else needs it

    if not folder.is_dir():
        raise LoadError("no such folder", which=folder, expected="a copy of the data set")
    own = folder / config
    try:
        saved = next((p for p in (own / split, own, folder) if (p / "state.json").is_file()), None)
        if saved is not None:
            found = datasets.load_from_disk(str(saved)).to_iterable_dataset()
        else:
            names = datasets.get_dataset_config_names(str(folder))
            if config not in names and not own.is_dir():
                folders = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
                raise LoadError(
                    "no such configuration", which="--config", got=config,
                    expected=f"one of {', '.join(sorted({*names, *folders} - {'default'}))}",
                )  # fmt: skip
            where, name = (folder, config) if config in names else (own, None)
            found = datasets.load_dataset(str(where), name, split=split, streaming=True)
        found = found.decode(False)
        columns = list(found.column_names or next(iter(found), {}))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError("data set cannot be read", which=folder, got=error) from error
    return columns, iter(found)


def _options(row: Row) -> dict[str, str]:
    """Letter -> text of the options column; {} without one."""
    options = row.values.get("options")
    if isinstance(options, Mapping):
        return {str(key): str(value) for key, value in options.items() if value is not None}
    if isinstance(options, (list, tuple)):
        stripped = [re.sub(r"^\(?[A-F][).:]\s*", "", str(item)) for item in options]
        return dict(zip("ABCDEF", stripped, strict=False))
    return {}
