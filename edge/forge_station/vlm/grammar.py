"""Grammars of answers as automata over token ids: one of some options, or ascending columns, or
all rows of a grid.

They are built through the tokenizer and never assume that a word or a number is one token. It
knows nothing of logits. A line ends with a newline, so that `hex_nut M8` is not a prefix of
`hex_nut M8x30`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import ModelError
from forge_station.vlm.text import TextCodec

Tokens = tuple[int, ...]
NONE = "none"
COLUMNS = 16
FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A deterministic automaton. State 0 is the start; only states with a choice are kept.

    `vocabulary` int64 [n]: the ids that occur at a choice. `mask` float32 [states, n]: 0 where
    the id is allowed, -inf elsewhere. `steps[state, i]` follows a choice: the tokens that are then
    forced (feed them together with the choice) and the next state, or -1 - k when string k is
    complete; `finishes` bool [states, n] marks the latter. `opening`: tokens that are forced
    before the first choice.
    """

    kind: str
    opening: Tokens
    vocabulary: NDArray[np.int64]
    mask: NDArray[np.float32]
    finishes: NDArray[np.bool_]
    steps: Mapping[tuple[int, int], tuple[Tokens, int]]
    strings: tuple[str, ...]
    none_index: int | None = None
    """Column of `vocabulary` that starts `none` (columns grammar)."""
    first: tuple[Tokens, ...] = ()
    """Tokens of each column as the first of a line (columns grammar)."""
    following: tuple[Tokens, ...] = ()
    """Tokens of each column behind another one (columns grammar)."""
    index: Mapping[int, int] = field(default_factory=dict)
    """Token id -> column of `vocabulary`."""
    ending: Tokens = ()
    """Tokens that end a row (columns and rows grammar)."""
    row_keys: tuple[Tokens, ...] = ()
    """Tokens of each row's key (rows grammar)."""
    closing: Tokens = ()
    """Tokens that end the text (rows grammar)."""

    def text(self, tokens: Sequence[int], string: int) -> str:
        """The string that ended as `string`, from all its tokens behind the key."""
        if self.strings[string]:
            return self.strings[string]
        return ",".join(str(column + 1) for column in self.columns(tokens))

    def columns(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """0-based columns named by the tokens of a complete or broken off grid row."""
        left = tuple(tokens)
        found: list[int] = []
        while True:
            choices = self.following if found else self.first
            matches = [c for c, part in enumerate(choices) if left[: len(part)] == part]
            if not matches:
                return tuple(found)
            best = max(matches, key=lambda column: len(choices[column]))
            found.append(best)
            left = left[len(choices[best]) :]


def options(
    codec: TextCodec, texts: Sequence[str], *, prefix: str = " ", ending: str = "\n"
) -> Grammar:
    """A line that reads exactly one of `texts`. `prefix` stands between the key and the option."""
    if not texts or not all(texts) or len(set(texts)) != len(texts):
        raise ModelError("options of an answer", expected="one or more different texts", got=texts)
    edges: list[tuple[Hashable, Tokens, Hashable]] = [
        ("start", tuple(codec.encode(prefix + text + ending)), n) for n, text in enumerate(texts)
    ]
    return _compile("options", edges, tuple(texts))


def columns(
    codec: TextCodec, *, prefix: str = " ", separator: str = ",", ending: str = "\n"
) -> Grammar:
    """A grid row: `none`, or ascending columns of 1..16 such as `5,6,9`."""
    first, following, end = _column_tokens(codec, prefix, separator, ending)
    none = tuple(codec.encode(prefix + NONE))
    edges: list[tuple[Hashable, Tokens, Hashable]] = [("start", none + end, 0)]
    for column in range(COLUMNS):
        edges.append(("start", first[column], ("last", column)))
        edges.append((("last", column), end, 1))
        for later in range(column + 1, COLUMNS):
            edges.append((("last", column), following[later], ("last", later)))
    grammar = _compile("columns", edges, (NONE, ""))
    start = len(grammar.opening)
    if none[:start] != grammar.opening or none[start] in {part[start] for part in first}:
        raise ModelError("tokenizer does not tell `none` from a column by the first token")
    none_index = grammar.index[none[start]]
    return replace(grammar, none_index=none_index, first=first, following=following, ending=end)


def rows(
    codec: TextCodec,
    keys: Sequence[str],
    *,
    prefix: str = " ",
    separator: str = ",",
    ending: str = "\n",
    closing: str = "<|im_end|>",
) -> Grammar:
    """A whole grid as one text: a line `key 5,6` for each row that is not empty, in order."""
    first, following, end = _column_tokens(codec, prefix, separator, ending)
    named = tuple(tuple(codec.encode(key)) for key in keys)
    close = tuple(codec.encode(closing))
    edges: list[tuple[Hashable, Tokens, Hashable]] = []
    for line in range(-1, len(keys)):  # behind row `line`; -1: at the start
        source: Hashable = "start" if line < 0 else ("line", line)
        edges += [(source, named[row], ("row", row)) for row in range(line + 1, len(keys))]
        edges.append((source, close, 0))
    for row in range(len(keys)):
        for column in range(COLUMNS):
            edges.append((("row", row), first[column], ("last", row, column)))
            edges.append((("last", row, column), end, ("line", row)))
            for later in range(column + 1, COLUMNS):
                edges.append((("last", row, column), following[later], ("last", row, later)))
    grammar = _compile("rows", edges, ("complete",))
    return replace(
        grammar, first=first, following=following, ending=end, row_keys=named, closing=close
    )


def _column_tokens(
    codec: TextCodec, prefix: str, separator: str, ending: str
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...], Tokens]:
    """Tokens of each column as the first, of each behind another one, and of the line's end."""
    end = tuple(codec.encode(ending))
    first = tuple(tuple(codec.encode(f"{prefix}{c}")) for c in range(1, COLUMNS + 1))
    following = tuple(tuple(codec.encode(f"{separator}{c}")) for c in range(1, COLUMNS + 1))
    for line in ((4, 5), (0, 15), (8, 9), (10, 11, 15), (0,)):
        text = separator.join(str(column + 1) for column in line)
        parts = first[line[0]] + sum((following[c] for c in line[1:]), ()) + end
        if tuple(codec.encode(prefix + text + ending)) != parts:
            raise ModelError(
                "tokenizer joins the columns of a grid row",
                which=repr(text),
                expected="tokens of the columns one after the other",
                action="write grid rows with a separator that this tokenizer splits at",
            )
    return first, following, end


def _compile(
    kind: str, edges: Sequence[tuple[Hashable, Tokens, Hashable]], strings: tuple[str, ...]
) -> Grammar:
    """Edges (node, tokens, node or number of the finished string) -> automaton by subsets."""
    leaving: dict[Hashable, list[int]] = {}
    for number, (source, tokens, _) in enumerate(edges):
        if not tokens:
            raise ModelError("an answer has no tokens", which=kind)
        leaving.setdefault(source, []).append(number)

    def at(node: Hashable) -> frozenset[tuple[int, int]]:
        return frozenset((number, 0) for number in leaving[node])

    def follow(state: frozenset[tuple[int, int]]) -> dict[int, frozenset[tuple[int, int]] | int]:
        """Token -> next subset, or the number of the string that it completes."""
        reached: dict[int, set[tuple[int, int]]] = {}
        done: dict[int, int] = {}
        for number, offset in state:
            _, tokens, target = edges[number]
            token = tokens[offset]
            items = reached.setdefault(token, set())
            if offset + 1 < len(tokens):
                items.add((number, offset + 1))
            elif isinstance(target, int):
                done[token] = target
            else:
                items |= at(target)
        for token in done:
            if reached[token]:
                raise ModelError("one answer is the beginning of another", which=strings)
        return {t: done[t] if t in done else frozenset(items) for t, items in reached.items()}

    def forced(state: frozenset[tuple[int, int]] | int) -> tuple[Tokens, object]:
        """Run through states that allow one token only."""
        run: list[int] = []
        while not isinstance(state, int):
            moves = follow(state)
            if len(moves) > 1:
                break
            ((token, state),) = moves.items()
            run.append(token)
        return tuple(run), state

    opening, start = forced(at("start"))
    numbers: dict[object, int] = {start: 0}
    waiting = [start]
    found: list[tuple[int, int, Tokens, int]] = []
    while waiting:
        state = waiting.pop()
        if isinstance(state, int):  # a single option: nothing to choose
            break
        assert isinstance(state, frozenset)
        for token, target in follow(state).items():
            run, resolved = forced(target)
            if isinstance(resolved, int):
                following = -1 - resolved
            else:
                if resolved not in numbers:
                    numbers[resolved] = len(numbers)
                    waiting.append(resolved)
                following = numbers[resolved]
            found.append((numbers[state], token, run, following))
    vocabulary = np.array(sorted({token for _, token, _, _ in found}), np.int64)
    index = {int(token): i for i, token in enumerate(vocabulary)}
    mask = np.full((len(numbers), len(vocabulary)), FORBIDDEN, np.float32)
    finishes = np.zeros(mask.shape, np.bool_)
    steps: dict[tuple[int, int], tuple[Tokens, int]] = {}
    for source, token, run, following in found:
        mask[source, index[token]] = 0.0
        finishes[source, index[token]] = following < 0
        steps[source, index[token]] = (run, following)
    return Grammar(kind, opening, vocabulary, mask, finishes, steps, strings, index=index)
