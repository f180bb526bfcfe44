"""Constrained decoding of many short answer lines at once, behind one trunk.

It knows packs, grammars and logits, and nothing of sessions, images or checks. Finished branches
are not fed again; alternatives of an options line are followed as further segments of the same
pack, so the probability of every reported string is exact.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import ModelError
from forge_station.vlm.grammar import Grammar, Tokens
from forge_station.vlm.packing import Contexts, Pack, pack

Cache = Sequence[Any]
"""Keys and values as the forward pass keeps them: handed on, never looked into."""
Forward = Callable[[Pack, Cache, NDArray[np.int64]], tuple[NDArray[np.float32], Cache]]
"""(pack, past keys and values, positions [K]) -> (logits [K, V], keys and values with the pack)."""

_NEGLIGIBLE = 1e-30


@dataclass(frozen=True)
class Branch:
    """One answer line: the key (`A:`, `front r5:`) and the grammar of what may follow.

    `beams`: how many strings are followed at once (None: 4 for options, 1 for others).
    `row_threshold` (columns): with None the most probable token decides between `none` and a
    column; else a row is written when P(row non-empty), corrected for the training weight of
    `none`, reaches the threshold.
    """

    key: str
    grammar: Grammar
    row_threshold: float | None = None
    beams: int | None = None
    follow: Tokens = ()
    """Tokens behind the key to write in any case: what an answer costs, how probable it is."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one call. A branch that exceeds one is flagged `overrun` and has no text."""

    max_tokens: int = 96
    time_budget_s: float = math.inf
    min_alternative: float = 0.01
    """Strings less probable than this are not followed, unless they end with the next choice."""


@dataclass(frozen=True)
class BranchResult:
    """What a branch says.

    `logprob`: log of the product of the probabilities renormalised over what the grammar allows.
    `raw_logprob`: the same choices over the whole vocabulary (how much the model wanted something
    else). Forced tokens count 1 in both. `choice_probs`: renormalised probability of each choice.
    `alternatives`: (string, probability) of every string followed to its end, best first, the
    chosen one included. `nonempty`: corrected P(row non-empty), columns grammar only. On
    `overrun` the text is empty and `tokens` holds what there was.
    """

    key: str
    text: str
    tokens: Tokens
    logprob: float
    raw_logprob: float
    choice_probs: tuple[float, ...]
    alternatives: tuple[tuple[str, float], ...]
    nonempty: float | None = None
    overrun: bool = False

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)

    @property
    def raw_probability(self) -> float:
        return math.exp(self.raw_logprob)


@dataclass(frozen=True)
class DecodeStats:
    """Forward passes and tokens fed by one call."""

    passes: int
    tokens: int


@dataclass
class _Hypothesis:
    branch: int
    state: int
    segment: Tokens
    parent: int
    tokens: Tokens
    logprob: float = 0.0
    raw: float = 0.0
    probs: tuple[float, ...] = ()


@dataclass
class _Finished:
    hypothesis: _Hypothesis
    text: str


def corrected_nonempty(p_none: NDArray[np.float64], none_weight: float) -> NDArray[np.float64]:
    """P(row non-empty) from the model's P(`none`), whose loss was weighted by `none_weight`."""
    corrected: NDArray[np.float64] = (1 - p_none) / (p_none / none_weight + 1 - p_none)
    return corrected


def log_normaliser(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log sum exp over the last axis, [K, V] -> [K]."""
    top = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - top, dtype=np.float32).sum(axis=-1, dtype=np.float64)
    normaliser: NDArray[np.float64] = np.log(total) + top[..., 0]
    return normaliser


def choice_logprobs(
    grammar: Grammar, logits: NDArray[np.float32], states: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Logits [K, V] at choice `states` [K] -> renormalised log-probabilities [K, vocabulary].

    Raises ModelError where they are not finite: no comparison with NaN ever stops a part.
    """
    allowed = logits[:, grammar.vocabulary] + grammar.mask[states]
    normaliser = log_normaliser(allowed)
    _refuse_not_finite(normaliser)
    return allowed - normaliser[:, None]


def _refuse_not_finite(values: NDArray[np.float64]) -> None:
    if not np.isfinite(values).all():
        raise ModelError("the model's answer is not finite", expected="finite logits", got="NaN")


def decode(
    forward: Forward,
    cache: Cache,
    contexts: Contexts,
    encode: Callable[[str], Sequence[int]],
    branches: Sequence[Branch],
    none_weight: float,
    limits: Limits,
) -> tuple[list[BranchResult], DecodeStats]:
    """Decode all branches behind the single context of a trunk."""
    deadline = time.perf_counter() + limits.time_budget_s
    finished: list[list[_Finished]] = [[] for _ in branches]
    nonempty: list[float | None] = [None] * len(branches)
    alive: list[_Hypothesis] = []
    for number, branch in enumerate(branches):
        grammar = branch.grammar
        segment = (*encode(branch.key), *grammar.opening)
        hypothesis = _Hypothesis(number, 0, segment, 0, grammar.opening)
        if len(grammar.vocabulary):
            alive.append(hypothesis)
        else:
            finished[number].append(_Finished(hypothesis, grammar.strings[0]))
    passes = fed = 0
    while alive and (not passes or time.perf_counter() < deadline):
        packed = pack(contexts, [h.parent for h in alive], [h.segment for h in alive])
        logits, cache = forward(packed, cache, packed.last)
        contexts = packed.contexts
        passes, fed = passes + 1, fed + len(packed.ids)
        grown = _choose(alive, branches, logits, none_weight, limits, finished, nonempty)
        alive = [h for h in grown if len(h.tokens) <= limits.max_tokens]
        for lost in (h for h in grown if len(h.tokens) > limits.max_tokens):
            _give_up(lost, finished)
    for lost in alive:
        _give_up(lost, finished)
    results = [
        _result(branch, found, value)
        for branch, found, value in zip(branches, finished, nonempty, strict=True)
    ]
    return results, DecodeStats(passes, fed)


def _choose(
    alive: Sequence[_Hypothesis],
    branches: Sequence[Branch],
    logits: NDArray[np.float32],
    none_weight: float,
    limits: Limits,
    finished: list[list[_Finished]],
    nonempty: list[float | None],
) -> list[_Hypothesis]:
    """Extend every hypothesis by its best token and by those worth following; vectorised."""
    normaliser = log_normaliser(logits)
    _refuse_not_finite(normaliser)
    by_grammar: dict[int, list[int]] = {}
    for row, hypothesis in enumerate(alive):
        by_grammar.setdefault(id(branches[hypothesis.branch].grammar), []).append(row)
    grown: list[_Hypothesis] = []
    for rows in by_grammar.values():
        grammar = branches[alive[rows[0]].branch].grammar
        states = np.array([alive[row].state for row in rows])
        taken = logits[rows]
        logprobs = choice_logprobs(grammar, taken, states)
        raw = taken[:, grammar.vocabulary] - normaliser[rows, None]
        best = logprobs.argmax(axis=1)
        if grammar.none_index is not None:
            _rows(grammar, alive, rows, branches, states, logprobs, best, none_weight, nonempty)
        for i, row in enumerate(rows):
            if branches[alive[row].branch].follow:
                wanted = branches[alive[row].branch].follow[len(alive[row].tokens)]
                best[i] = grammar.index[wanted]
        total = logprobs + np.array([alive[row].logprob for row in rows])[:, None]
        chosen = {(i, int(token)) for i, token in enumerate(best)}
        if any(_beams(branches[alive[row].branch]) > 1 for row in rows):
            # A string that ends here costs nothing more: report it however unlikely it is.
            worth = total >= math.log(max(limits.min_alternative, _NEGLIGIBLE))
            worth |= grammar.finishes[states] & (total >= math.log(_NEGLIGIBLE))
            chosen.update(
                (int(i), int(token))
                for i, token in np.argwhere(worth)
                if _beams(branches[alive[rows[i]].branch]) > 1
            )
        for i, token in sorted(chosen):
            before = alive[rows[i]]
            run, following = grammar.steps[int(states[i]), token]
            segment = (int(grammar.vocabulary[token]), *run)
            after = _Hypothesis(
                before.branch,
                following,
                segment,
                rows[i],
                before.tokens + segment,
                float(total[i, token]),
                before.raw + float(raw[i, token]),
                (*before.probs, math.exp(logprobs[i, token])),
            )
            if following < 0:
                text = grammar.text(after.tokens, -1 - following)
                finished[after.branch].append(_Finished(after, text))
            else:
                grown.append(after)
    return _prune(grown, branches)


def _rows(
    grammar: Grammar,
    alive: Sequence[_Hypothesis],
    rows: Sequence[int],
    branches: Sequence[Branch],
    states: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    best: NDArray[np.int64],
    none_weight: float,
    nonempty: list[float | None],
) -> None:
    """First choice of grid rows: note P(row non-empty); apply the threshold where one is set."""
    assert grammar.none_index is not None
    p_none = np.exp(logprobs[:, grammar.none_index])
    corrected = corrected_nonempty(p_none, none_weight)
    without = logprobs.copy()
    without[:, grammar.none_index] = -np.inf
    columns = without.argmax(axis=1)
    for i, row in enumerate(rows):
        if states[i] == 0:
            branch = alive[row].branch
            nonempty[branch] = float(corrected[i])
            threshold = branches[branch].row_threshold
            if threshold is not None:
                best[i] = columns[i] if corrected[i] >= threshold else grammar.none_index


def _beams(branch: Branch) -> int:
    if branch.follow:
        return 1
    if branch.beams is not None:
        return branch.beams
    return 4 if branch.grammar.kind == "options" else 1


def _prune(grown: list[_Hypothesis], branches: Sequence[Branch]) -> list[_Hypothesis]:
    """Keep the best `beams` hypotheses of every branch."""
    by_branch: dict[int, list[_Hypothesis]] = {}
    for hypothesis in grown:
        by_branch.setdefault(hypothesis.branch, []).append(hypothesis)
    kept: list[_Hypothesis] = []
    for branch, group in by_branch.items():
        group.sort(key=lambda h: -h.logprob)
        kept.extend(group[: _beams(branches[branch])])
    return kept


def _give_up(lost: _Hypothesis, finished: list[list[_Finished]]) -> None:
    """A hypothesis left over: it does not matter when a finished string beats all it could be."""
    found = finished[lost.branch]
    if not any(f.text and f.hypothesis.logprob >= lost.logprob for f in found):
        found.append(_Finished(lost, ""))


def _result(branch: Branch, found: list[_Finished], nonempty: float | None) -> BranchResult:
    ranked = sorted(found, key=lambda f: (f.text != "", -f.hypothesis.logprob))
    best = ranked[0]
    result = BranchResult(
        branch.key,
        best.text,
        best.hypothesis.tokens,
        best.hypothesis.logprob,
        best.hypothesis.raw,
        best.hypothesis.probs,
        tuple((f.text, math.exp(f.hypothesis.logprob)) for f in ranked if f.text),
        nonempty,
    )
    return replace(result, overrun=True) if not best.text else result
