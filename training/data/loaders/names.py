"""Labels coded in file names -> what is at each mark of a photo.

A regular expression with named groups reads a name. Groups that are one capital letter are marks,
in reading order; `group` and `run` are what --group knows; others are ignored.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from forge_station.contract import tasks
from training.data import conversations
from training.data.examples import Message
from training.data.loaders.sample import (
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    Sample,
    part_name,
    pictures_in,
    sample_id,
)

HELP = """Photos whose names say what is at each position.

  python -m training.load names screws/images --out .work/screws \\
      --pattern '^[0-9]+_(?P<A>[01])(?P<B>[01])(?P<C>[01])(?P<D>[01])$' --values 1=screw,0=none

The pattern reads the name without its suffix. A, B, C ... are the positions in reading order (left
to right, then down); --values says what each code means, `none` for an empty place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of the photos")
    parser.add_argument("--pattern", required=True, help="regular expression with groups A, B, ...")
    parser.add_argument("--values", required=True, help="code=meaning,... e.g. 1=screw,0=none")


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    return load(args.folder, args.pattern, parse_values(args.values), grouping, problems)


def load(
    folder: Path, pattern: str, values: Mapping[str, str], grouping: Grouping, problems: Problems
) -> Loaded:
    """All photos below `folder`; `values`: code in the name -> what lies there (or `none`)."""
    compiled = parse_pattern(pattern)
    paths = pictures_in(folder)
    groups = grouping.names([path.relative_to(folder).as_posix() for path in paths])
    samples: list[Sample] = []
    for path in paths:
        relative = path.relative_to(folder)
        with problems.of(relative):
            found = positions(path.stem, compiled, values)
            samples.append(
                Sample(
                    id=sample_id(folder, path),
                    pictures=(Picture(path, which=str(relative)),),
                    messages=photo_positions(found),
                    group=groups[relative.as_posix()],
                    labels=tuple(f"{mark}:{what}" for mark, what in found.items()),
                    clean=tasks.NONE not in found.values(),
                )
            )
    name = folder.resolve()
    return Loaded(name.parent.name if name.name == "images" else name.name, samples)


def photo_positions(found: Mapping[str, str]) -> tuple[Message, ...]:
    """What lies at each mark of a photo, as a marks sheet without sizes: `A: screw`, `B: none`."""
    return conversations.sheet(tasks.positions_facts(list(found)), found)


def positions(stem: str, pattern: re.Pattern[str], values: Mapping[str, str]) -> dict[str, str]:
    """Mark -> meaning of a file name without suffix."""
    match = pattern.search(stem)
    if match is None:
        raise LoadError("name has no label", which="name", expected=pattern.pattern, got=stem)
    found = {}
    for mark, code in match.groupdict().items():
        if len(mark) == 1:
            if code not in values:
                raise LoadError(
                    "unknown value", which=mark, expected=", ".join(values), got=str(code)
                )
            found[mark] = values[code]
    return dict(sorted(found.items()))


def parse_pattern(text: str) -> re.Pattern[str]:
    """The expression, which must name at least one mark A..Z."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise LoadError("not a regular expression", which="--pattern", got=error) from error
    if not any(re.fullmatch("[A-Z]", name) for name in pattern.groupindex):
        raise LoadError("no position", which="--pattern", expected="(?P<A>...)", got=text)
    return pattern


def parse_values(text: str) -> dict[str, str]:
    """`1=screw,0=none` -> code -> meaning."""
    out = {}
    for item in text.split(","):
        code, equals, meaning = item.partition("=")
        if not equals:
            raise LoadError("not a value", which="--values", expected="code=meaning", got=item)
        out[code.strip()] = part_name(meaning.strip())
    return out
