"""Rewards of an answer against its target: pure functions of text or cells, no torch.

    total = 1.0 dice + 0.3 score + 0.1 format (+ 1.0 choice + 1.0 reading)      (see `Recipe`)

dice, score and format are VIEScore2's; choice and reading are for the answers that the benchmark
and the marks sheet have besides. A component is None where the target does not supervise it: a
part whose grid nobody drew is unlabelled, not clean, so `none` earns nothing there. Used by the
nano loop (`cell_dice` on arrays) and, through `trl_rewards`, by TRL's GRPOTrainer.

Text is read strictly: a policy would learn every hole of a lenient parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import grid_text, tasks
from forge_station.contract.error import ContractError
from forge_station.contract.grid import DefectGrid
from forge_station.contract.views import MARKS

MAJOR_WEIGHT = 2.0
"""What a true `!` cell counts in hits and misses; a false cell always counts 1 (VIEScore2)."""


class RewardError(ContractError):
    """A target or a setting that no reward can be computed from."""


@dataclass(frozen=True)
class Recipe:
    """Weights of the components and the shape of the Dice reward.

    The published recipe is `Recipe(clean_cells=None)`: there any alarm on a clean part earns 0,
    and GRPO raised the clean alarms from 63 to 85 of 115. A group in which every answer alarms
    then has no advantage to learn from; with `clean_cells` = k the reward is 1 - FP/k (0 at
    least), so fewer false cells are better. `alarm_cost` is taken off on top whenever a clean part
    is marked at all. Beware: where advantages are scaled by the deviation of their group, the size
    of a cost cancels out in groups that differ in nothing else; there the share of clean prompts
    is what counts.
    """

    dice: float = 1.0
    score: float = 0.3
    format: float = 0.1
    choice: float = 1.0
    reading: float = 1.0
    beta: float = 1.0
    """Above 1 a missed cell costs more than a false one."""
    clean_cells: float | None = 16.0
    """k: false cells from which a clean part earns nothing; 16 is one row of the grid."""
    alarm_cost: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (np.isfinite(value) and value >= 0):
                raise RewardError("not a reward setting", which=field.name, got=value)
        if self.beta == 0 or self.clean_cells == 0:
            raise RewardError("beta and clean_cells must be above 0", got=self)

    @property
    def weights(self) -> dict[str, float]:
        """Component -> weight, in the order of `COMPONENTS`."""
        return {name: getattr(self, name) for name in COMPONENTS}


COMPONENTS = ("dice", "score", "format", "choice", "reading")
PUBLISHED = Recipe(clean_cells=None)


def cell_dice(
    predicted: NDArray[np.bool_],
    truth: NDArray[np.bool_],
    recipe: Recipe = PUBLISHED,
    major: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Coverage-weighted Dice over the last axis, bool [..., cells] -> float64 [...].

    ((1 + b^2) TP) / ((1 + b^2) TP + b^2 FN + FP), with true `major` cells counting 2 in TP and FN.
    Both empty 1; without a hit 0; a clean truth with false cells as the recipe says.
    """
    weight = np.ones(truth.shape) if major is None else np.where(major, MAJOR_WEIGHT, 1.0)
    hits = (weight * (predicted & truth)).sum(-1)
    missed = (weight * (truth & ~predicted)).sum(-1)
    return counted_dice(hits, missed, (predicted & ~truth).sum(-1), recipe)


def counted_dice(
    hits: NDArray[Any], missed: NDArray[Any], false: NDArray[Any], recipe: Recipe = PUBLISHED
) -> NDArray[np.float64]:
    """`cell_dice` from weighted hits and misses and the number of false cells, elementwise."""
    square = recipe.beta**2
    below = (1 + square) * hits + square * missed + false
    value = np.where(hits > 0, (1 + square) * hits / np.maximum(below, 1e-12), 0.0)
    kept: NDArray[Any] | float = 0.0
    if recipe.clean_cells is not None:
        kept = np.maximum(0.0, 1 - false / recipe.clean_cells)
    clean = np.where(false > 0, kept - recipe.alarm_cost, 1.0)
    return np.asarray(np.where(hits + missed > 0, value, clean), np.float64)


@dataclass(frozen=True)
class Fields:
    """What stands in an answer; None or absent: not there, or not readable exactly.

    grids: view -> grid, "" for a text without view names. The channels of a view are merged by
    union (a defect in the wrong channel is found all the same); views are different pictures and
    are never merged: their cells are counted side by side. choices: `class:`, `answer:`,
    `missing:` and, in turn two, `A:` -> right or wrong. readings: `A:` -> workpiece, model number.
    """

    grids: Mapping[str, DefectGrid] | None
    scores: Mapping[str, int]
    choices: Mapping[str, str]
    readings: Mapping[str, tuple[str, str]]
    faults: tuple[str, ...] = ()
    """Lines that could not be read, and keys with two different answers."""


_CHOICES = (tasks.CLASS_KEY, tasks.ANSWER_KEY, tasks.MISSING_KEY)
_SCORE_KEYS = frozenset(f"{name}:" for name in grid_text.SCORE_NAMES)
_MARK_KEYS = frozenset(tasks.mark_key(mark) for mark in MARKS)
_VIEW_ROW = re.compile(r"([a-z_]+) (r\d+:.*)")
_VIEW_NONE = re.compile(r"([a-z_]+): *none")


def parse(text: str) -> Fields:
    """Read an answer in the station's lines (`front r5: 5,6`) or VIEScore2's (`r5: 8,9!,10`)."""
    grid_lines: dict[str, list[str]] = {}
    scores: dict[str, int] = {}
    keyed: dict[str, str] = {}
    faults: list[str] = []
    lost: set[str] = set()
    for line in filter(None, (raw.strip() for raw in text.split("\n"))):
        key, colon, answer = line.partition(":")
        key, answer = key + colon, answer.strip()
        if key in _SCORE_KEYS:
            value = int(answer[:-3]) if re.fullmatch(r"\d{1,2}/10", answer) else -1
            if not 0 <= value <= 10 or scores.setdefault(key, value) != value:
                lost.add(key)
        elif key in _CHOICES or key in _MARK_KEYS:
            if not answer or keyed.setdefault(key, answer) != answer:
                lost.add(key)
        elif row := _VIEW_ROW.fullmatch(line):
            grid_lines.setdefault(row[1], []).append(row[2])
        elif (empty := _VIEW_NONE.fullmatch(line)) and empty[1] not in grid_text.CHANNELS:
            grid_lines.setdefault(empty[1], []).append(grid_text.NONE)
        elif re.fullmatch(rf"r\d+:.*|{grid_text.NONE}|(artifact|misalign):", line):
            grid_lines.setdefault("", []).append(line)
        else:
            faults.append(line)
    grids = {}
    for view, lines in grid_lines.items():
        grid = _grid(lines)
        if grid is None:
            faults.append(f"{view} grid".strip())
        else:
            grids[view] = grid
    readable = grid_lines and not faults
    return Fields(
        grids if readable else None,
        {k.rstrip(":"): v for k, v in scores.items() if k not in lost},
        {k: v for k, v in keyed.items() if k not in lost and not _is_reading(k, v)},
        {k: _halves(v) for k, v in keyed.items() if k not in lost and _is_reading(k, v)},
        (*faults, *sorted(lost)),
    )


def read_target(text: str) -> Fields:
    """The fields that a target supervises. RewardError for anything in it that is unreadable."""
    wanted = parse(text)
    if wanted.faults or not (wanted.grids or wanted.scores or wanted.choices or wanted.readings):
        raise RewardError(
            "target cannot be read",
            which="; ".join(wanted.faults) or "no field",
            expected="lines `key: answer` of the contract, every grid row exact",
            got=repr(text[:200]),
            action="correct the example; an unlabelled grid must be left out, not malformed",
        )
    return wanted


def r_dice(answer: Fields, wanted: Fields, recipe: Recipe = PUBLISHED) -> float | None:
    """r_dice over the cells of all views of the target; unparsed, or other views: 0."""
    if wanted.grids is None:
        return None
    if answer.grids is None or set(answer.grids) != set(wanted.grids):
        return 0.0
    views = sorted(wanted.grids)
    cells, truth, major = (
        np.concatenate([getattr(grids[view], layer).ravel() for view in views])
        for grids, layer in (
            (answer.grids, "cells"),
            (wanted.grids, "cells"),
            (wanted.grids, "major"),
        )
    )
    return float(cell_dice(cells, truth, recipe, major))


def r_score(answer: Fields, wanted: Fields) -> float | None:
    """r_score = 1 - |s^ - s| / 10, missing 0; of two axes (pq, sc) the mean."""
    if not wanted.scores:
        return None
    parts = [
        1 - abs(answer.scores[name] - value) / 10 if name in answer.scores else 0.0
        for name, value in wanted.scores.items()
    ]
    return sum(parts) / len(parts)


def r_format(answer: Fields, wanted: Fields) -> float:
    """r_format: 1 where what the target asks for can be read, else 0; nothing else is asked.

    As published the grid for targets with a grid, the scores for targets with scores only; and
    every choice and reading of the target.
    """
    there = set(wanted.choices) <= set(answer.choices)
    there &= set(wanted.readings) <= set(answer.readings)
    if wanted.grids is not None:
        there &= answer.grids is not None and set(answer.grids) == set(wanted.grids)
    else:
        there &= set(wanted.scores) <= set(answer.scores)
    return float(there)


def r_choice(answer: Fields, wanted: Fields) -> float | None:
    """Share of the target's choices (class, letter, missing part, right or wrong) met exactly."""
    if not wanted.choices:
        return None
    met = [answer.choices.get(key) == value for key, value in wanted.choices.items()]
    return sum(met) / len(met)


def r_reading(answer: Fields, wanted: Fields) -> float | None:
    """Mean over marks: half for the workpiece, half for the model number, each on its own.

    A mark that is not on the sheet counts as one that is wrong.
    """
    if not wanted.readings:
        return None
    earned = 0.0
    for mark, (workpiece, number) in wanted.readings.items():
        said = answer.readings.get(mark, ("", ""))
        earned += 0.5 * (said[0] == workpiece) + 0.5 * (said[1] == number)
    return earned / len(set(wanted.readings) | set(answer.readings))


def rewards(text: str, wanted: Fields, recipe: Recipe | None = None) -> dict[str, float | None]:
    """Every component of an answer's reward, unweighted, in the order of `COMPONENTS`."""
    recipe = recipe or Recipe()
    answer = parse(text)
    return {
        "dice": r_dice(answer, wanted, recipe),
        "score": r_score(answer, wanted),
        "format": r_format(answer, wanted),
        "choice": r_choice(answer, wanted),
        "reading": r_reading(answer, wanted),
    }


def total(parts: Mapping[str, float | None], recipe: Recipe | None = None) -> float:
    """The weighted sum of the components that the target supervises."""
    weights = (recipe or Recipe()).weights
    return sum(weights[name] * value for name, value in parts.items() if value is not None)


RewardFunction = Callable[..., list[float | None]]


def trl_rewards(recipe: Recipe | None = None) -> tuple[list[RewardFunction], list[float]]:
    """(reward_funcs, reward_weights) for TRL's GRPOTrainer; one function a component.

    TRL calls them with `completions` (strings, or conversations whose last message counts) and
    the dataset's columns as keywords; the column `target` holds the target's text. None leaves a
    row out of that component.
    """
    recipe = recipe or Recipe()

    def component(name: str) -> RewardFunction:
        def of(completions: Sequence[Any], target: Sequence[str], **_: Any) -> list[float | None]:
            wanted = [read_target(text) for text in target]
            texts = [item if isinstance(item, str) else item[-1]["content"] for item in completions]
            return [
                rewards(text, one, recipe)[name] for text, one in zip(texts, wanted, strict=True)
            ]

        of.__name__ = f"{name}_reward"
        return of

    return [component(name) for name in COMPONENTS], list(recipe.weights.values())


def _grid(lines: Sequence[str]) -> DefectGrid | None:
    channels = any(line.rstrip(":") in grid_text.CHANNELS for line in lines)
    request = grid_text.Request(grid="channels" if channels else "flat")
    return grid_text.parse("\n".join(lines), request).answer.grid


def _is_reading(key: str, answer: str) -> bool:
    return key in _MARK_KEYS and answer not in (tasks.RIGHT, tasks.WRONG)


def _halves(answer: str) -> tuple[str, str]:
    workpiece, _, number = answer.partition(" ")
    return workpiece, number.strip()
