"""Exact probabilities of all options of a line in one forward pass. No decoding loop.

Every choice point of the options' trie becomes a segment of one pack, so `score: 0/10 .. 10/10`,
a letter or a whole catalogue costs its trie's tokens once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forge_station.errors import ModelError
from forge_station.vlm.decode import Cache, Forward, choice_logprobs
from forge_station.vlm.grammar import Grammar, Tokens
from forge_station.vlm.packing import Contexts, pack


def option_probabilities(
    forward: Forward,
    cache: Cache,
    contexts: Contexts,
    encode: Callable[[str], Sequence[int]],
    keys: Sequence[str],
    grammar: Grammar,
) -> list[dict[str, float]]:
    """Per key: option -> probability; they sum to 1. Same numbers as decoding each to its end."""
    if grammar.kind != "options":
        raise ModelError("only an options grammar can be scored", got=grammar.kind)
    if not len(grammar.vocabulary):
        return [{grammar.strings[0]: 1.0} for _ in keys]
    states = len(grammar.mask)
    segments: list[Tokens] = [()] * states
    before = [-1] * states
    for (state, column), (run, following) in grammar.steps.items():
        if following >= 0:  # an options automaton is a trie: one way into every state
            segments[following] = (int(grammar.vocabulary[column]), *run)
            before[following] = state
    feed: list[Tokens] = []
    inner: list[int] = []
    for number, key in enumerate(keys):
        feed += [(*encode(key), *grammar.opening), *segments[1:]]
        inner += [parent + number * states if parent >= 0 else -1 for parent in before]
    packed = pack(contexts, [0] * len(feed), feed, inner)
    logits, _ = forward(packed, cache, packed.last)
    logprobs = choice_logprobs(grammar, logits, np.tile(np.arange(states), len(keys)))
    logprobs = logprobs.reshape(len(keys), states, -1)
    reached = np.zeros((len(keys), states))
    total = np.full((len(keys), len(grammar.strings)), -np.inf)
    for (state, column), (_, following) in sorted(grammar.steps.items()):
        value = reached[:, state] + logprobs[:, state, column]
        if following >= 0:
            reached[:, following] = value
        else:
            total[:, -1 - following] = value
    return [dict(zip(grammar.strings, np.exp(row).tolist(), strict=True)) for row in total]
