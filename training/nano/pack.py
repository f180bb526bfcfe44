"""Samples -> packed training sequences: one trunk, many answer branches, one attention mask.

A sample's conversation is laid out exactly as the station decodes it: the trunk (system, picture,
facts), then every answer line as a branch that sees the trunk and itself; on a marks sheet a second
turn (readings, specification) follows the trunk and carries its own branches. Positions restart
behind the text a branch hangs on.

Knows the contract's text and the nano tokenizer; knows no model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE
from training.nano import model as nano

IGNORE = -100
NONE_WEIGHT = 0.25
"""Loss weight of an empty grid row: most rows are empty. The station undoes it at read-out."""
GridForm = Literal["rows", "text"]
TRUNK, TURN_TWO, FIRST_BRANCH, PAD = 0, 1, 2, -1
PART_IDS: tuple[str, ...] = tuple(model.id for model in CATALOGUE)


def encode(text: str) -> tuple[int, ...]:
    """Token ids in the fixed vocabulary; KeyError names a word it lacks."""
    return nano.default_encoder().encode(text)


@dataclass
class Packed:
    """One packed sequence in the tokens of `encoder`; all lists have its length.

    tokens, target (IGNORE where nothing is predicted), weight, position (3 rows), segment
    (TRUNK, TURN_TWO or a branch number) and parent (the segment a branch hangs on).
    """

    tokens: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    position: list[tuple[int, int, int]] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    encoder: nano.Encoder = field(default_factory=nano.default_encoder)
    _branches: int = 0

    def add_text(self, ids: tuple[int, ...], segment: int, start: int) -> int:
        """Append unsupervised text; returns the next position."""
        for i, token in enumerate(ids):
            self._append(token, IGNORE, 0.0, (start + i,) * 3, segment, TRUNK)
        return start + len(ids)

    def add_trunk(self, before: str, image: tuple[int, int] | None, after: str) -> int:
        """Append the trunk; `image` is (height, width) in pixels. Returns the next position."""
        encode, table = self.encoder.encode, self.encoder.ids
        ids = list(encode(before))
        pad = table[tasks.IMAGE_TOKEN]
        if image is not None:
            ids += [table[tasks.IMAGE_OPEN]]
            ids += [pad] * nano.image_tokens(*image) + [table[tasks.IMAGE_CLOSE]]
        ids += encode(after)
        positions = nano.trunk_positions(np.array(ids), pad, *(image or (28, 28)))
        for i, token in enumerate(ids):
            where = (int(positions[0, i]), int(positions[1, i]), int(positions[2, i]))
            self._append(token, IGNORE, 0.0, where, TRUNK, TRUNK)
        return int(positions.max()) + 1

    def add_branch(
        self,
        key: str,
        answer: str,
        start: int,
        parent: int = TRUNK,
        weight: float = 1.0,
        ending: str = "\n",
    ) -> None:
        """Append `key` and its answer line; `none` ends itself, other answers in `ending`."""
        encode = self.encoder.encode
        keys = encode(key)
        wanted = encode(answer) if answer == tasks.NONE else encode(answer + ending)
        segment = FIRST_BRANCH + self._branches
        self._branches += 1
        inputs = keys + wanted[:-1]
        for i, token in enumerate(inputs):
            predicts = wanted[i - len(keys) + 1] if i >= len(keys) - 1 else IGNORE
            where = (start + i,) * 3
            self._append(
                token, predicts, weight if predicts != IGNORE else 0.0, where, segment, parent
            )

    def _append(
        self,
        token: int,
        target: int,
        weight: float,
        position: tuple[int, int, int],
        segment: int,
        parent: int,
    ) -> None:
        self.tokens.append(token)
        self.target.append(target)
        self.weight.append(weight)
        self.position.append(position)
        self.segment.append(segment)
        self.parent.append(parent)


@dataclass(frozen=True)
class Judgement:
    """Turn two of a marks sheet: what is required and what the right answers are."""

    kind: str
    required: dict[str, int] | None
    wrong: tuple[str, ...]
    """Marks that are wrong or too many."""
    missing: str
    score: int

    @property
    def answer(self) -> str:
        """The benchmark's letter: the first wrong mark, or none."""
        return self.wrong[0] if self.wrong else tasks.NONE


def judge(kind: str, required: dict[str, int] | None, readings: dict[str, str]) -> Judgement:
    """The right answers by rule. `required` None: the majority of a batch is right."""
    if required is None:
        counts = Counter(readings.values())
        top = max(counts.values())
        expected = next(part for part in readings.values() if counts[part] == top)
    if kind == "batch":
        part = expected if required is None else next(iter(required))
        odd = [mark for mark, reading in sorted(readings.items()) if reading != part]
        score = tasks.conformity_score(len(odd))
        return Judgement(kind, required, tuple(odd), tasks.NONE, score)
    left = Counter(required or {})
    surplus = []
    for mark, reading in sorted(readings.items()):
        if left[reading] > 0:
            left[reading] -= 1
        else:
            surplus.append(mark)
    missing = [part for part in (required or {}) if left[part] > 0]
    violations = max(len(surplus), sum(left.values()))
    return Judgement(
        kind,
        required,
        tuple(surplus),
        missing[0] if missing else tasks.NONE,
        tasks.conformity_score(violations),
    )


def random_requirement(
    readings: dict[str, str], rng: np.random.Generator
) -> tuple[str, dict[str, int] | None]:
    """A specification that the readings meet, or nearly meet, so that every answer occurs."""
    counts = Counter(readings.values())
    if len(counts) <= 2 and max(counts.values()) >= 3 and rng.random() < 0.8:
        part = counts.most_common(1)[0][0]
        draw = rng.random()
        if draw < 0.45:
            return "batch", None
        return "batch", {part if draw < 0.9 else str(rng.choice(PART_IDS)): len(readings)}
    required = dict(counts)
    draw = rng.random()
    parts = list(required)
    chosen = str(rng.choice(parts))
    if draw < 0.25:  # one part too many on the tray
        required[chosen] -= 1
    elif draw < 0.5:  # one part too few
        other = chosen if rng.random() < 0.3 else _neighbour(chosen, rng)
        required[other] = required.get(other, 0) + 1
    elif draw < 0.7:  # a wrong one in place of the right one
        required[chosen] -= 1
        other = _neighbour(chosen, rng)
        required[other] = required.get(other, 0) + 1
    kept = [(part, n) for part, n in required.items() if n > 0]
    if not kept:
        kept = [(chosen, 1)]
    order = rng.permutation(len(kept))
    return "assembly", {kept[i][0]: kept[i][1] for i in order}


def _neighbour(part: str, rng: np.random.Generator) -> str:
    """Another part: of the same workpiece (a look-alike) or any."""
    workpiece = part.split()[0]
    pool = [other for other in PART_IDS if other != part and other.split()[0] == workpiece]
    if not pool or rng.random() < 0.3:
        pool = [other for other in PART_IDS if other != part]
    return str(rng.choice(pool))


def pack_sheet(
    readings: dict[str, str],
    sizes: dict[str, tuple[float, float, float]],
    mm_per_px: float,
    image: tuple[int, int],
    rng: np.random.Generator,
) -> Packed:
    """Turn one: a branch a mark. Turn two: answer, missing, score on a random specification."""
    packed = Packed()
    facts = tasks.sheet_facts(sizes, mm_per_px)
    start = packed.add_trunk(tasks.TRUNK_OPEN, image, facts + tasks.ASSISTANT)
    for mark, reading in readings.items():
        packed.add_branch(tasks.mark_key(mark), reading, start)
    _add_judgement(packed, readings, start, rng)
    return packed


def pack_judgement(readings: dict[str, str], rng: np.random.Generator) -> Packed:
    """Turn two without a picture: the rule is symbolic and is learned from text alone."""
    packed = Packed()
    start = packed.add_trunk(tasks.TRUNK_OPEN, None, tasks.ASSISTANT)
    _add_judgement(packed, readings, start, rng)
    return packed


def _add_judgement(
    packed: Packed, readings: dict[str, str], start: int, rng: np.random.Generator
) -> None:
    kind, required = random_requirement(readings, rng)
    right = judge(kind, required, readings)
    text = tasks.readings_text(readings) + tasks.NEXT_USER
    text += tasks.judge_text(kind, required) + tasks.ASSISTANT
    start = packed.add_text(encode(text), TURN_TWO, start)
    for mark in readings:
        verdict = tasks.WRONG if mark in right.wrong else tasks.RIGHT
        packed.add_branch(tasks.mark_key(mark), verdict, start, TURN_TWO)
    packed.add_branch(tasks.ANSWER_KEY, right.answer, start, TURN_TWO)
    packed.add_branch(tasks.MISSING_KEY, right.missing, start, TURN_TWO)
    packed.add_branch(tasks.SCORE_KEY, f"{right.score}/10", start, TURN_TWO, 0.5)


def pack_surface(
    part: str,
    size: tuple[float, float, float],
    defect: str,
    grid: np.ndarray | None,
    score: int | None,
    image: tuple[int, int],
    rng: np.random.Generator,
    form: GridForm = "rows",
    most_rows: int = 12,
) -> Packed:
    """Class, score and grid; `grid` [3, 16, 16] bool; no score of a closer look (None).

    A grid of None is not known: nobody drew the cells, and only class and score are learned.

    rows: at most `most_rows` filled and as many empty rows are drawn, a branch each; their weights
    stand for the rest. text: the filled rows as one text, as the read-out `text` writes them.
    """
    request = str(rng.choice(tasks.REQUESTS, p=[0.1, 0.1, 0.8]))
    packed = Packed()
    facts = tasks.surface_facts(part, size, request)
    start = packed.add_trunk(tasks.TRUNK_OPEN, image, facts + tasks.ASSISTANT)
    packed.add_branch(tasks.CLASS_KEY, defect, start, weight=2.0)
    if request != "grid" and score is not None:
        packed.add_branch(tasks.SCORE_KEY, f"{score}/10", start, weight=0.5)
    if request != "score" and grid is not None:
        views = {view: i for i, view in enumerate(("front", "side", "top"))}
        filled = [(v, r) for v, r in tasks.ROW_KEYS if grid[views[v], r].any()]
        if form == "text":
            rows = [(v, r, np.nonzero(grid[views[v], r])[0].tolist()) for v, r in filled]
            whole = "".join(f"{tasks.row_key(v, r)} {tasks.row_text(c)}\n" for v, r, c in rows)
            packed.add_branch(tasks.GRID_KEY, whole, start, ending=tasks.GRID_END)
            return packed
        empty = [(v, r) for v, r in tasks.ROW_KEYS if not grid[views[v], r].any()]
        for keys in (filled, empty):
            drawn = rng.permutation(len(keys))[:most_rows]
            share = len(keys) / max(1, len(drawn))
            for view, row in (keys[i] for i in drawn):
                columns = np.nonzero(grid[views[view], row])[0].tolist()
                weight = share if columns else share * NONE_WEIGHT
                text = tasks.row_text(columns)
                packed.add_branch(tasks.row_key(view, row), text, start, weight=weight)
    return packed


@dataclass(frozen=True)
class Batch:
    """Padded tensors of packed sequences: see `Packed`. mask [B, 1, T, T] bool (True = sees)."""

    tokens: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor
    segment: torch.Tensor
    mask: torch.Tensor


def collate(packed: list[Packed]) -> Batch:
    """Right-pad and build the branch mask."""
    length = (max(len(p.tokens) for p in packed) + 7) // 8 * 8
    shape = (len(packed), length)
    tokens = np.zeros(shape, np.int64)
    target = np.full(shape, IGNORE, np.int64)
    weight = np.zeros(shape, np.float32)
    position = np.zeros((3, *shape), np.int64)
    segment = np.full(shape, PAD, np.int64)
    parent = np.zeros(shape, np.int64)
    for i, p in enumerate(packed):
        n = len(p.tokens)
        tokens[i, :n], target[i, :n], weight[i, :n] = p.tokens, p.target, p.weight
        position[:, i, :n] = np.array(p.position).T
        segment[i, :n], parent[i, :n] = p.segment, p.parent
    seg, par = torch.from_numpy(segment), torch.from_numpy(parent)
    same = seg[:, :, None] == seg[:, None, :]
    on_trunk = (seg[:, None, :] == TRUNK) & (seg[:, :, None] != PAD)
    on_turn_two = (seg[:, None, :] == TURN_TWO) & (par[:, :, None] == TURN_TWO)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (same | on_trunk | on_turn_two) & causal
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(target),
        torch.from_numpy(weight),
        torch.from_numpy(position),
        seg,
        mask[:, None],
    )
