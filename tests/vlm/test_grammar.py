"""Grammars over two tokenizers: one token a word, and byte-level BPE that splits digits."""

from __future__ import annotations

import random

import pytest

from forge_station.errors import ModelError
from forge_station.vlm import grammar
from forge_station.vlm.text import TextCodec
from tests import nano_checkpoint

PARTS = ("hex_bolt M8", "hex_bolt M8x20", "hex_bolt M8x30", "hex_nut M8", "pin M5x20")


@pytest.fixture(scope="module", params=["word", "byte"])
def codec(request):
    make = {"word": nano_checkpoint.word_tokenizer, "byte": nano_checkpoint.byte_tokenizer}
    return TextCodec(make[request.param]())


def walk(automaton: grammar.Grammar, ids: list[int]) -> str | None:
    """The string that the ids spell, or None when the automaton refuses them."""
    at = len(automaton.opening)
    if tuple(ids[:at]) != automaton.opening:
        return None
    state = 0
    while state >= 0:
        column = automaton.index.get(ids[at]) if at < len(ids) else None
        if column is None or automaton.mask[state, column] != 0:
            return None
        run, state = automaton.steps[state, column]
        at += 1 + len(run)
        if tuple(ids[at - len(run) : at]) != run:
            return None
    return automaton.text(ids, -1 - state) if at == len(ids) else None


@pytest.mark.parametrize(
    "line",
    ["", "5,4", "5,5", "0", "17", ",5", "5,6,", "none,5", "5,none", "05", "1,,2", "5 6", "16,1"],
)
def test_malformed_rows_are_refused(codec, line):
    try:
        ids = codec.encode(f" {line}\n")
    except ModelError:
        return  # not even words of the nano tokenizer
    assert walk(grammar.columns(codec), ids) is None


def test_every_ascending_row_is_accepted_and_read_back(codec):
    rows = grammar.columns(codec)
    chance = random.Random(1)
    lines = [[c] for c in range(16)] + [list(range(16))]
    lines += [sorted(chance.sample(range(16), chance.randint(2, 15))) for _ in range(400)]
    for line in lines:
        text = ",".join(str(column + 1) for column in line)
        ids = codec.encode(f" {text}\n")
        assert walk(rows, ids) == text
        assert rows.columns(ids) == tuple(line)
    assert walk(rows, codec.encode(" none\n")) == "none"


def test_options_accept_exactly_the_options(codec):
    parts = grammar.options(codec, PARTS)
    for part in PARTS:
        assert walk(parts, codec.encode(f" {part}\n")) == part
    for other in ("hex_bolt", "hex_nut M8x20", "pin M8", "hex_bolt M8x30 M8", "none"):
        assert walk(parts, codec.encode(f" {other}\n")) is None


def test_a_single_option_leaves_no_choice(codec):
    only = grammar.options(codec, ["none"])
    assert len(only.vocabulary) == 0
    assert only.opening == tuple(codec.encode(" none\n"))
    assert only.strings == ("none",)


def test_forced_tokens_are_not_choices(codec):
    parts = grammar.options(codec, ("hex_bolt M8x20", "hex_bolt M8x30"))
    assert len(parts.mask) == 1, "one choice: the length"
    assert all(following < 0 for _, following in parts.steps.values())


@pytest.mark.parametrize("texts", [(), ("a", "a"), ("dent", "")])
def test_bad_option_lists_are_errors(codec, texts):
    with pytest.raises(ModelError, match="options of an answer"):
        grammar.options(codec, texts)


def test_a_word_outside_the_vocabulary_is_an_error():
    codec = TextCodec(nano_checkpoint.word_tokenizer())
    with pytest.raises(ModelError, match=r"'sprocket'.*does not know|does not know.*'sprocket'"):
        grammar.options(codec, ("hex_bolt M8", "sprocket"))


def test_an_option_that_begins_another_needs_an_ending():
    codec = TextCodec(nano_checkpoint.word_tokenizer())
    with pytest.raises(ModelError, match="beginning of another"):
        grammar.options(codec, PARTS, ending="")


def test_a_tokenizer_that_joins_columns_is_refused():
    codec = TextCodec(nano_checkpoint.word_tokenizer())
    with pytest.raises(ModelError, match=r"joins the columns|does not know"):
        grammar.columns(codec, separator="")
