"""Three ways to read a grid, one interface: written and read back, followed, cut short."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from forge_station.contract import tasks
from forge_station.errors import ModelError
from forge_station.vlm import grammar, grid_readout
from forge_station.vlm.decode import Branch, Limits, decode
from forge_station.vlm.grid_readout import (
    READOUTS,
    cells_of,
    read_grid,
    row_tokens,
    text_tokens,
)
from forge_station.vlm.packing import Contexts
from forge_station.vlm.text import TextCodec
from tests import nano_checkpoint
from tests.vlm.fake_language import FakeLanguage

KEYS = [tasks.row_key(view, row) for view in ("front", "top") for row in range(16)]
TRUNK = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", params=["word", "byte"])
def codec(request):
    make = {"word": nano_checkpoint.word_tokenizer, "byte": nano_checkpoint.byte_tokenizer}
    return TextCodec(make[request.param]())


@pytest.fixture(scope="module")
def whole(codec):
    return grammar.rows(codec, KEYS)


def grid(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((len(KEYS), 16)) < rng.choice([0.02, 0.2, 0.7])) & (
        rng.random((len(KEYS), 1)) < 0.4
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_grid_written_as_text_reads_back(codec, whole, seed):
    cells = grid(seed)
    tokens = text_tokens(whole, cells)
    assert (cells_of(whole, tokens, len(KEYS)) == cells).all()
    lines = [
        f"{key} {tasks.row_text(np.flatnonzero(row).tolist())}\n"
        for key, row in zip(KEYS, cells, strict=True)
        if row.any()
    ]
    assert list(tokens) == codec.encode("".join(lines) + "<|im_end|>")


def test_of_a_text_that_was_cut_only_complete_rows_count(whole):
    cells = np.zeros((len(KEYS), 16), bool)
    cells[3, [4, 5]] = cells[9, [0, 15]] = True
    tokens = text_tokens(whole, cells)
    for cut in range(len(tokens) + 1):
        read = cells_of(whole, tokens[:cut], len(KEYS))
        for row in (3, 9):
            assert not read[row].any() or (read[row] == cells[row]).all()
    first = len(whole.row_keys[3] + row_tokens(whole, cells[3]))
    assert cells_of(whole, tokens[:first], len(KEYS)).any()
    assert not cells_of(whole, tokens[: first - 1], len(KEYS)).any()


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_is_followed_is_written_whatever_the_model_prefers(codec, whole, seed):
    cells, language = grid(seed), FakeLanguage(codec.vocab_size)
    root = Contexts.root(len(TRUNK), len(TRUNK))
    tokens = text_tokens(whole, cells)
    branch = Branch(tasks.GRID_KEY, whole, follow=tokens)
    limits = Limits(max_tokens=10_000)
    (result,), stats = decode(
        language.forward, language.trunk(TRUNK), root, codec.encode, [branch], 1.0, limits
    )
    assert result.tokens == tokens
    assert not result.overrun
    rows = grammar.columns(codec)
    filled = [row for row in range(len(KEYS)) if cells[row].any()]
    branches = [Branch(KEYS[r], rows, follow=row_tokens(rows, cells[r])) for r in filled]
    found, parallel = decode(
        language.forward, language.trunk(TRUNK), root, codec.encode, branches, 1.0, limits
    )
    assert [r.text for r in found] == [
        tasks.row_text(np.flatnonzero(cells[r]).tolist()) for r in filled
    ]
    if filled:  # as many passes as the longest row, not as all of them
        assert parallel.passes < stats.passes


def trunk_of(model):
    picture = np.random.default_rng(3).integers(0, 256, (112, 112, 3), np.uint8)
    image = tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE
    return model.trunk([picture], tasks.TRUNK_OPEN + image + "surface joint" + tasks.ASSISTANT)


@pytest.mark.parametrize("how", READOUTS)
def test_each_way_gives_cells_in_the_order_of_the_keys(model, how):
    trunk = trunk_of(model)
    read = read_grid(model, trunk, KEYS, how, 0.4, Limits(max_tokens=200))
    assert read.cells.shape == (len(KEYS), 16)
    assert read.cells.dtype == bool
    assert not read.overrun
    assert (read.probabilities is None) == (how != "soft")
    again = read_grid(model, trunk, KEYS, how, 0.4, Limits(max_tokens=200))
    assert (again.cells == read.cells).all()


def test_rows_are_those_that_the_branches_write(model):
    trunk = trunk_of(model)
    read = read_grid(model, trunk, KEYS, "rows", 0.4, Limits())
    branches = [Branch(key, model.columns_grammar(), row_threshold=0.4) for key in KEYS]
    texts = [result.text for result in model.decode_branches(trunk, branches)]
    assert [tasks.row_text(np.flatnonzero(row).tolist()) for row in read.cells] == texts


def test_the_soft_threshold_is_a_knob(model):
    trunk = trunk_of(model)
    counts = [
        int(read_grid(model, trunk, KEYS, "soft", at, Limits()).cells.sum())
        for at in (0.0, 0.01, 0.1, 0.5, 1.01)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == len(KEYS) * 16 and counts[-1] == 0


@pytest.mark.parametrize("how", ["rows", "text"])
def test_a_budget_that_is_too_small_is_an_overrun_and_no_guess(model, how, monkeypatch):
    if how == "text":  # the random model may prefer an empty grid: write a filled one
        tokens = text_tokens(model.rows_grammar(KEYS), grid(1))
        make = partial(Branch, follow=tokens)
        monkeypatch.setattr(grid_readout, "Branch", make)
    trunk = trunk_of(model)
    whole = read_grid(model, trunk, KEYS, how, 0.0, Limits(max_tokens=200))
    read = read_grid(model, trunk, KEYS, how, 0.0, Limits(time_budget_s=0.0))
    assert read.overrun and not whole.overrun
    done = read.cells.any(axis=1)  # rows that were complete after the one pass
    assert (read.cells[done] == whole.cells[done]).all()
    assert done.sum() < whole.cells.any(axis=1).sum()


def test_a_key_that_the_tokenizer_does_not_know_is_an_error(model):
    with pytest.raises(ModelError, match="does not know"):
        read_grid(model, trunk_of(model), ["bottom r1:"], "text", 0.5, Limits())
