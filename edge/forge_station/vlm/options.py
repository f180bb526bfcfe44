"""Probabilities of all options of answer lines. No decoding loop.

Every choice point of a line's options (a trie) becomes a segment of one pack, so `score: 0/10 ..
10/10`, a letter or a whole catalogue costs its trie's tokens once, and several lines share the
pass. A large trie that the model hardly doubts is cheaper level by level: choice points that it
reaches with less than `floor` are then left closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forge_station.errors import ModelError
from forge_station.vlm.decode import Cache, Forward, choice_logprobs
from forge_station.vlm.grammar import Grammar, Tokens
from forge_station.vlm.packing import Contexts, pack


@dataclass(frozen=True)
class OptionLine:
    """The tokens of a line's key, and the options of what follows."""

    key: Tokens
    grammar: Grammar


@dataclass(frozen=True)
class _Trie:
    """Choice points of an options grammar, parents before children.

    Of each: the tokens that lead to it from its parent, the parent (-1: none), and how many
    options end below it. `steps`: (point, column of the vocabulary, next point or -1 - option).
    """

    segments: tuple[Tokens, ...]
    parents: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int, int], ...]


def option_probabilities(
    forward: Forward,
    cache: Cache,
    contexts: Contexts,
    lines: Sequence[OptionLine],
    *,
    behind: Tokens = (),
    floor: float = 0.0,
) -> list[dict[str, float]]:
    """Per line: option -> probability; they sum to 1. Same numbers as decoding each to its end.

    `behind`: tokens to read first, behind the single context. `floor`: a choice point that is
    reached with less stays closed, and what reaches it is shared evenly by the options below: all
    still sum to 1, and none is off by more than `floor`. 0: every point, all in one pass.
    """
    tries = [_trie(line.grammar) for line in lines]
    reached = [[-math.inf] * len(trie.segments) for trie in tries]
    total = [np.full(len(line.grammar.strings), -np.inf) for line in lines]
    for number, trie in enumerate(tries):
        if trie.segments:
            reached[number][0] = 0.0
        else:  # a single option: nothing to choose
            total[number][0] = 0.0
    level = [(number, 0) for number, trie in enumerate(tries) if trie.segments]
    if not floor:
        level = [(n, point) for n, _ in level for point in range(len(tries[n].segments))]
    first, where = True, dict[tuple[int, int], int]()
    while level:
        feed = [behind] if first and behind else []
        start, place = len(feed), {node: len(feed) + i for i, node in enumerate(level)}
        inner, parents = [-1] * start, [0] * start
        for number, point in level:
            key = (*lines[number].key, *lines[number].grammar.opening)
            feed.append(tries[number].segments[point] if point else key)
            above = (number, tries[number].parents[point])
            inner.append(place.get(above, start - 1))
            parents.append(where.get(above, 0))
        packed = pack(contexts, parents, feed, inner)
        logits, cache = forward(packed, cache, packed.last[start:])
        following = []
        for number, own in _by_line(level).items():
            trie, grammar = tries[number], lines[number].grammar
            rows = [place[number, point] - start for point in own]
            logprobs = choice_logprobs(grammar, logits[rows], np.array(own))
            row = dict(zip(own, logprobs, strict=True))
            for point, column, next_point in trie.steps:
                if point not in row:
                    continue
                value = reached[number][point] + float(row[point][column])
                if next_point < 0:
                    total[number][-1 - next_point] = value
                    continue
                reached[number][next_point] = value
                if (number, next_point) in place:
                    continue
                if value >= math.log(floor):
                    following.append((number, next_point))
                else:
                    options = list(trie.below[next_point])
                    total[number][options] = value - math.log(len(options))
        contexts, where, level, first = packed.contexts, place, following, False
    return [
        dict(zip(line.grammar.strings, np.exp(found).tolist(), strict=True))
        for line, found in zip(lines, total, strict=True)
    ]


def _by_line(level: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    points: dict[int, list[int]] = {}
    for number, point in level:
        points.setdefault(number, []).append(point)
    return points


@lru_cache(maxsize=64)
def _trie(grammar: Grammar) -> _Trie:
    """An options automaton is a trie: one way into every state."""
    if grammar.kind != "options":
        raise ModelError("only an options grammar can be scored", got=grammar.kind)
    if not len(grammar.vocabulary):
        return _Trie((), (), (), ())
    states = len(grammar.mask)
    segments: list[Tokens] = [()] * states
    parents, below = [-1] * states, [list[int]() for _ in range(states)]
    steps = tuple((s, c, following) for (s, c), (_, following) in sorted(grammar.steps.items()))
    for (state, column), (run, following) in grammar.steps.items():
        if following >= 0:
            segments[following] = (int(grammar.vocabulary[column]), *run)
            parents[following] = state
        else:
            below[state].append(-1 - following)
    for state in range(states - 1, 0, -1):
        below[parents[state]] += below[state]
    return _Trie(tuple(segments), tuple(parents), tuple(map(tuple, below)), steps)
