"""Decoding against brute force: every string scored by itself on a small fake language."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from forge_station.errors import ModelError
from forge_station.vlm import grammar
from forge_station.vlm.decode import Branch, Limits, decode
from forge_station.vlm.options import OptionLine, option_probabilities
from forge_station.vlm.packing import Contexts
from forge_station.vlm.soft_grid import soft_rows
from forge_station.vlm.text import TextCodec
from tests import nano_checkpoint
from tests.vlm.fake_language import FakeLanguage

PARTS = tuple(
    f"{kind} {size}{length}"
    for kind, size, length in itertools.product(
        ("hex_bolt", "hex_nut", "pin"), ("M5", "M8"), ("", "x20", "x30")
    )
)
TRUNK = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", params=["word", "byte"])
def codec(request):
    make = {"word": nano_checkpoint.word_tokenizer, "byte": nano_checkpoint.byte_tokenizer}
    return TextCodec(make[request.param]())


def run(language, codec, branches, limits=None, none_weight=0.25):
    root = Contexts.root(len(TRUNK), len(TRUNK))
    return decode(
        language.forward,
        language.trunk(TRUNK),
        root,
        codec.encode,
        branches,
        none_weight,
        limits or Limits(),
    )


def brute(language, codec, automaton, key, text) -> tuple[float, float]:
    """(renormalised, raw) log-probability of one string, token by token in the plain way."""
    ids = codec.encode(f" {text}\n")
    context = TRUNK + codec.encode(key) + list(automaton.opening)
    at, state, total, raw = len(automaton.opening), 0, 0.0, 0.0
    while state >= 0:
        allowed = automaton.vocabulary[automaton.mask[state] == 0].tolist()
        total += language.logprobs(context, allowed)[ids[at]]
        raw += language.logprobs(context, range(language.vocab))[ids[at]]
        run_, state = automaton.steps[state, automaton.index[ids[at]]]
        context = [*context, ids[at], *run_]
        at += 1 + len(run_)
    return total, raw


def test_every_reported_string_has_its_exact_probability(codec):
    language = FakeLanguage(codec.vocab_size, spread=1.0)
    parts = grammar.options(codec, PARTS)
    branches = [Branch(key, parts, beams=len(PARTS)) for key in ("A:", "B:", "C:")]
    results, _ = run(language, codec, branches, Limits(min_alternative=0.0))
    for result in results:
        exact = {p: brute(language, codec, parts, result.key, p) for p in PARTS}
        best = max(exact, key=lambda part: exact[part][0])
        assert result.text == best
        assert result.logprob == pytest.approx(exact[best][0], abs=1e-5)
        assert result.raw_logprob == pytest.approx(exact[best][1], abs=1e-5)
        assert result.probability == pytest.approx(math.prod(result.choice_probs), rel=1e-5)
        assert len(result.alternatives) == len(PARTS)
        assert sum(p for _, p in result.alternatives) == pytest.approx(1, abs=1e-5)
        for text, probability in result.alternatives:
            assert math.log(probability) == pytest.approx(exact[text][0], abs=1e-5)


def test_beams_find_a_string_that_greedy_choice_misses(codec):
    """`hex_bolt` is likelier than `hex_nut` as a first word, but its lengths share the mass."""
    missed = 0
    parts = grammar.options(codec, PARTS)
    for seed in range(40):
        language = FakeLanguage(codec.vocab_size, spread=1.0)
        key = f"{'ABCDEF'[seed % 6]}:" + f" {seed // 6}"
        (greedy,), _ = run(language, codec, [Branch(key, parts, beams=1)])
        (wide,), _ = run(language, codec, [Branch(key, parts, beams=6)])
        assert wide.logprob >= greedy.logprob - 1e-6
        missed += wide.text != greedy.text
    assert missed > 0


def test_one_word_options_are_reported_completely_after_one_pass():
    codec = TextCodec(nano_checkpoint.word_tokenizer())
    language = FakeLanguage(codec.vocab_size, spread=4.0)
    classes = grammar.options(codec, ("normal", "crack", "cut", "deformation", "dent"))
    (result,), stats = run(language, codec, [Branch("class:", classes)])
    assert stats.passes == 1
    assert {text for text, _ in result.alternatives} == set(classes.strings)
    assert sum(p for _, p in result.alternatives) == pytest.approx(1, abs=1e-6)


def test_lines_with_other_options_share_a_pass_behind_more_text(codec):
    language = FakeLanguage(codec.vocab_size)
    parts = grammar.options(codec, PARTS)
    scores = grammar.options(codec, ["0/10", "9/10", "10/10"])
    one = grammar.options(codec, ["pin M5"])
    more = tuple(codec.encode("B: pin M5\n"))
    lines = [OptionLine(tuple(codec.encode(k)), g) for k, g in (("A:", parts), ("score:", scores))]
    root = Contexts.root(len(TRUNK), len(TRUNK))
    found = option_probabilities(
        language.forward,
        language.trunk(TRUNK),
        root,
        [*lines, OptionLine(lines[0].key, one)],
        behind=more,
    )
    assert language.passes == 1
    longer = Contexts.root(len(TRUNK) + len(more), len(TRUNK) + len(more))
    trunk = language.trunk([*TRUNK, *more])
    for line, together in zip(lines, found, strict=False):
        (alone,) = option_probabilities(language.forward, trunk, longer, [line])
        assert together == pytest.approx(alone, rel=1e-9)
    assert found[2] == {"pin M5": 1.0}


@pytest.mark.parametrize("floor", [1e-9, 0.02, 0.2])
def test_a_floor_moves_no_option_by_more(codec, floor):
    """Options that begin with less than the floor share what was left for them."""
    language = FakeLanguage(codec.vocab_size, spread=3.0)
    lines = [
        OptionLine(tuple(codec.encode(key)), grammar.options(codec, PARTS)) for key in ("A:", "B:")
    ]
    root = Contexts.root(len(TRUNK), len(TRUNK))
    trunk = language.trunk(TRUNK)
    exact = option_probabilities(language.forward, trunk, root, lines)
    cut = option_probabilities(language.forward, trunk, root, lines, floor=floor)
    for options, full in zip(cut, exact, strict=True):
        assert sum(options.values()) == pytest.approx(1, abs=1e-6)
        for part, probability in full.items():
            assert abs(options[part] - probability) <= floor
            if probability >= floor:
                assert options[part] == pytest.approx(probability, rel=1e-6)


def test_a_closed_choice_point_is_not_fed(codec):
    """With a high floor only the keys are fed: nothing is certain enough to go on."""
    language = FakeLanguage(codec.vocab_size, spread=0.01)
    line = OptionLine(tuple(codec.encode("A:")), grammar.options(codec, PARTS))
    root = Contexts.root(len(TRUNK), len(TRUNK))
    option_probabilities(language.forward, language.trunk(TRUNK), root, [line], floor=0.99)
    assert language.passes == 1


def test_branches_do_not_influence_each_other(codec):
    language = FakeLanguage(codec.vocab_size)
    rows, parts = grammar.columns(codec), grammar.options(codec, PARTS)
    branches = [Branch(f"front r{n}:", rows) for n in range(1, 17)] + [Branch("A:", parts)]
    together, stats = run(language, codec, branches)
    alone = [run(language, codec, [branch])[0][0] for branch in branches]
    backwards, _ = run(language, codec, branches[::-1])
    assert together == alone == backwards[::-1]
    assert stats.passes < 30


def test_options_are_scored_exactly_in_one_pass(codec):
    language = FakeLanguage(codec.vocab_size)
    parts = grammar.options(codec, PARTS)
    root = Contexts.root(len(TRUNK), len(TRUNK))
    lines = [OptionLine(tuple(codec.encode(key)), parts) for key in ("A:", "B:")]
    scored = option_probabilities(language.forward, language.trunk(TRUNK), root, lines)
    assert language.passes == 1
    for key, table in zip(("A:", "B:"), scored, strict=True):
        assert sum(table.values()) == pytest.approx(1, abs=1e-5)
        for part, probability in table.items():
            exact = math.exp(brute(language, codec, parts, key, part)[0])
            assert probability == pytest.approx(exact, rel=1e-4, abs=1e-9)


def test_row_probability_is_corrected_for_the_weight_of_none(codec):
    language = FakeLanguage(codec.vocab_size)
    rows = grammar.columns(codec)
    (result,), _ = run(language, codec, [Branch("top r3:", rows)], none_weight=0.25)
    p_none = math.exp(brute(language, codec, rows, "top r3:", "none")[0])
    odds = (1 - p_none) / (p_none / 0.25)
    assert result.nonempty == pytest.approx(odds / (1 + odds), rel=1e-4)
    (plain,), _ = run(language, codec, [Branch("top r3:", rows)], none_weight=1.0)
    assert plain.nonempty == pytest.approx(1 - p_none, rel=1e-4)


@pytest.mark.parametrize(("threshold", "empty"), [(0.0, False), (1.01, True)])
def test_a_row_threshold_decides_over_the_first_token(codec, threshold, empty):
    language = FakeLanguage(codec.vocab_size)
    rows = grammar.columns(codec)
    branches = [Branch(f"side r{n}:", rows, row_threshold=threshold) for n in range(1, 17)]
    results, stats = run(language, codec, branches)
    assert all((result.text == "none") == empty for result in results)
    assert (stats.passes == 1) == empty


def test_rows_are_ascending_columns(codec):
    language = FakeLanguage(codec.vocab_size)
    rows = grammar.columns(codec)
    branches = [Branch(f"{v} r{n}:", rows) for v in ("front", "top") for n in range(1, 17)]
    results, _ = run(language, codec, branches)
    for result in results:
        if result.text != "none":
            numbers = [int(word) for word in result.text.split(",")]
            assert numbers == sorted(set(numbers))
            assert 1 <= numbers[0] <= numbers[-1] <= 16


def test_soft_rows_equal_the_sum_over_all_rows_when_the_next_depends_on_the_last(codec):
    language = FakeLanguage(codec.vocab_size, markov=True, spread=1.0)
    rows = grammar.columns(codec)
    root = Contexts.root(len(TRUNK), len(TRUNK))
    keys = ["front r1:", "top r16:"]
    soft = soft_rows(
        language.forward, language.trunk(TRUNK), root, codec.encode, keys, rows, 0.25, floor=0.0
    )
    assert language.passes == 2
    for key, cells, nonempty in zip(keys, soft.cells, soft.nonempty, strict=True):
        expected = markov_inclusion(language, codec, rows, key)
        p_none = math.exp(brute(language, codec, rows, key, "none")[0])
        scale = ((1 - p_none) / (p_none / 0.25 + 1 - p_none)) / (1 - p_none)
        assert nonempty == pytest.approx(scale * (1 - p_none), rel=1e-4)
        assert cells == pytest.approx(scale * expected, rel=1e-3, abs=1e-5)


def markov_inclusion(language, codec, rows, key) -> np.ndarray:
    """P(column in row) by summing over all 65535 non-empty rows, memoised on the last column."""
    start = len(rows.opening)

    def conditional(last: int | None, then: int | None) -> float:
        """log P(column `then`, or the end, behind column `last`), with all of its tokens."""
        if last is None:
            ids, begin = list(rows.first[then]), start
        else:
            before = list(rows.first[last])
            ids, begin = before + list(rows.following[then] if then is not None else rows.ending), 0
            begin = len(before)
        context = TRUNK + codec.encode(key) + list(rows.opening)
        at, state, total = start, 0, 0.0
        while at < len(ids) and state >= 0:
            allowed = rows.vocabulary[rows.mask[state] == 0].tolist()
            if at >= begin:
                total += language.logprobs(context, allowed)[ids[at]]
            run_, state = rows.steps[state, rows.index[ids[at]]]
            context = [*context, ids[at], *run_]
            at += 1 + len(run_)
        return total

    first = np.exp([conditional(None, c) for c in range(16)])
    step = np.zeros((16, 17))
    for c in range(16):
        for d in range(c + 1, 16):
            step[c, d] = math.exp(conditional(c, d))
        step[c, 16] = math.exp(conditional(c, None))
    total = np.zeros(16)
    reach = first.copy()
    for c in range(16):
        complete = step[c].sum()  # below 1 where a column's digits may go on (1 -> 10..16)
        here = reach[c] * (complete if c == 0 else 1)
        total[c] = here
        reach[c + 1 :] += here * step[c, c + 1 : 16] / complete
    return total


def test_no_time_flags_unfinished_branches_and_gives_no_text(codec):
    language = FakeLanguage(codec.vocab_size)
    branches = [
        Branch("A:", grammar.options(codec, PARTS)),
        Branch("front r1:", grammar.columns(codec), row_threshold=1.01),
    ]
    (part, row), stats = run(language, codec, branches, Limits(time_budget_s=0.0))
    assert stats.passes == 1
    assert part.overrun
    assert part.text == ""
    assert part.tokens
    assert not row.overrun
    assert row.text == "none"


def test_a_token_budget_flags_long_answers(codec):
    language = FakeLanguage(codec.vocab_size)
    rows = grammar.columns(codec)
    branches = [Branch(f"front r{n}:", rows, row_threshold=0.0) for n in range(1, 17)]
    results, _ = run(language, codec, branches, Limits(max_tokens=len(rows.opening) + 2))
    assert any(result.overrun for result in results)
    assert all((result.text == "") == result.overrun for result in results)


def test_logits_that_are_not_finite_are_an_error(codec):
    language = FakeLanguage(codec.vocab_size)

    def broken(packed, cache, wanted):
        logits, cache = language.forward(packed, cache, wanted)
        return logits * np.float32(np.nan), cache

    root = Contexts.root(len(TRUNK), len(TRUNK))
    branch = Branch("A:", grammar.options(codec, PARTS))
    with pytest.raises(ModelError, match="not finite"):
        decode(broken, language.trunk(TRUNK), root, codec.encode, [branch], 1.0, Limits())
    line = OptionLine(tuple(codec.encode("answer:")), branch.grammar)
    with pytest.raises(ModelError, match="not finite"):
        option_probabilities(broken, language.trunk(TRUNK), root, [line])


def test_a_single_option_needs_no_pass(codec):
    language = FakeLanguage(codec.vocab_size)
    (result,), stats = run(language, codec, [Branch("A:", grammar.options(codec, ["pin M5"]))])
    assert (result.text, result.probability, stats.passes) == ("pin M5", 1.0, 0)
    assert result.alternatives == (("pin M5", 1.0),)


def test_no_branches_is_no_work(codec):
    language = FakeLanguage(codec.vocab_size)
    assert run(language, codec, [])[0] == []
