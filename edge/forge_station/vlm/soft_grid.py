"""Probability of every cell of grid rows, without decoding: one or two forward passes.

A row is a list of ascending columns, so the first column's probability is not a cell probability.
With p1(c) for the first column and p(d | c) for a column d behind c, the recurrence
inc(d) = p1(d) + sum over c < d of inc(c) p(d | c) gives the probability that d is in the row. It
assumes that the next column depends on the last one only (good for contiguous defects). Source:
the row-parallel study of the prototype, where it gave cell AP .81 against .44 for first columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from forge_station.vlm.decode import Cache, Forward, choice_logprobs, corrected_nonempty
from forge_station.vlm.grammar import COLUMNS, Grammar, Tokens
from forge_station.vlm.packing import Contexts, pack


@dataclass(frozen=True)
class SoftRows:
    """`cells` float32 [R, 16]: P(cell defective); `nonempty` float32 [R]: P(row non-empty).

    Both are corrected for the training weight of `none`.
    """

    cells: NDArray[np.float32]
    nonempty: NDArray[np.float32]


@dataclass(frozen=True)
class _Tree:
    """Choice points below a row key, and how the probabilities of columns read off them.

    Point 0 is the key itself; `segments`, `parents` (points, 0 for the key) and `states` list the
    others. Chain k multiplies dist[point[k, i], choice[k, i]] over i, where the last point is a
    padding whose value is 1. Chains: the 16 first columns, then for each column its ending, then
    the pairs (c, d).
    """

    segments: tuple[Tokens, ...]
    parents: tuple[int, ...]
    states: NDArray[np.int64]
    point: NDArray[np.int64]
    choice: NDArray[np.int64]
    pairs: NDArray[np.int64]


def soft_rows(
    forward: Forward,
    cache: Cache,
    contexts: Contexts,
    encode: Callable[[str], Sequence[int]],
    keys: Sequence[str],
    grammar: Grammar,
    none_weight: float,
    floor: float = 0.02,
) -> SoftRows:
    """Cell probabilities of the rows named by `keys`, behind the single context of a trunk.

    Rows with P(row non-empty) < `floor` are not expanded: their cells get that probability
    shared out as the first-column distribution, at most `floor` in all.
    """
    segments = [(*encode(key), *grammar.opening) for key in keys]
    packed = pack(contexts, [0] * len(keys), segments)
    logits, cache = forward(packed, cache, packed.last)
    root = np.exp(choice_logprobs(grammar, logits, np.zeros(len(keys), np.int64)))
    p_none = root[:, grammar.none_index]
    nonempty = corrected_nonempty(p_none, none_weight)
    scale = np.divide(nonempty, 1 - p_none, out=np.zeros_like(nonempty), where=p_none < 1)
    tree = _tree(grammar)
    start = len(grammar.opening)
    cells = scale[:, None] * root[:, [grammar.index[part[start]] for part in grammar.first]]
    expanded = np.nonzero(nonempty >= floor)[0]
    if len(expanded):
        nodes = len(tree.segments)
        parents = np.array(tree.parents) - 1
        offset = np.arange(len(expanded))[:, None] * nodes
        packed = pack(
            packed.contexts,
            np.repeat(expanded, nodes).tolist(),
            tree.segments * len(expanded),
            np.where(parents < 0, -1, parents + offset).reshape(-1).tolist(),
        )
        logits, cache = forward(packed, cache, packed.last)
        below = np.exp(choice_logprobs(grammar, logits, np.tile(tree.states, len(expanded))))
        below = below.reshape(len(expanded), nodes, -1)
        dist = np.concatenate([root[expanded, None], below, np.ones_like(below[:, :1])], axis=1)
        cells[expanded] = scale[expanded, None] * _inclusion(tree, dist)
    return SoftRows(np.minimum(cells, 1).astype(np.float32), nonempty.astype(np.float32))


@lru_cache(maxsize=8)
def _tree(grammar: Grammar) -> _Tree:
    """All choice points of first(c), and of what may follow it."""
    start = len(grammar.opening)
    points: dict[Tokens, tuple[int, Tokens, int, int]] = {(): (0, (), -1, 0)}
    first = [part[start:] for part in grammar.first]
    pairs = [(c, d) for c in range(COLUMNS) for d in range(c + 1, COLUMNS)]
    chains = [_chain(grammar, points, part, 0) for part in first]
    chains += [_chain(grammar, points, part + grammar.ending, len(part)) for part in first]
    for c, d in pairs:
        tokens = first[c] + grammar.following[d]
        chains.append(_chain(grammar, points, tokens, len(first[c])))
    depth = max(map(len, chains))
    padded = [chain + [(len(points), 0)] * (depth - len(chain)) for chain in chains]
    table = np.array(padded, np.int64)
    rest = list(points.values())[1:]
    return _Tree(
        tuple(segment for _, segment, _, _ in rest),
        tuple(parent for _, _, parent, _ in rest),
        np.array([state for _, _, _, state in rest], np.int64),
        table[:, :, 0],
        table[:, :, 1],
        np.array(pairs, np.int64),
    )


def _chain(
    grammar: Grammar,
    points: dict[Tokens, tuple[int, Tokens, int, int]],
    tokens: Tokens,
    begin: int,
) -> list[tuple[int, int]]:
    """Choices (point, vocabulary column) of tokens[begin:]; adds the points on the way."""
    chain: list[tuple[int, int]] = []
    at = state = point = 0
    while True:
        column = grammar.index[tokens[at]]
        if at >= begin:
            chain.append((point, column))
        run, following = grammar.steps[state, column]
        segment = (tokens[at], *run)
        at += len(segment)
        if following < 0 or at >= len(tokens):
            return chain
        path, state = tokens[:at], following
        if path not in points:
            points[path] = (len(points), segment, point, state)
        point = points[path][0]


def _inclusion(tree: _Tree, dist: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities at the points [R, points + 1, n] -> P(column in row) float64 [R, 16]."""
    chains = dist[:, tree.point, tree.choice].prod(axis=2)
    first, end, later = np.split(chains, [COLUMNS, 2 * COLUMNS], axis=1)
    follow = np.zeros((len(dist), COLUMNS, COLUMNS))
    follow[:, tree.pairs[:, 0], tree.pairs[:, 1]] = later
    complete = end + follow.sum(axis=2)
    inclusion: NDArray[np.float64] = first * complete
    follow /= np.maximum(complete, 1e-12)[:, :, None]
    for column in range(1, COLUMNS):
        before = inclusion[:, :column, None] * follow[:, :column, column, None]
        inclusion[:, column] += before.sum(axis=(1, 2))
    return inclusion
