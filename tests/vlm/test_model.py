"""The opened model: trunks, branches, limits of use. Parity with transformers: tests/export."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract import tasks
from forge_station.errors import BundleError, ModelError
from forge_station.vlm.decode import Branch, Limits
from forge_station.vlm.engine import CPU, Graph
from forge_station.vlm.model import VisionLanguageModel

PARTS = ("hex_bolt M8", "hex_bolt M8x20", "hex_bolt M8x30", "hex_nut M8", "pin M5x20")
PICTURE = tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE
FACTS = "marks scale 0.35\nA: 30.1 13.0 6.8"


def picture(seed: int, size: tuple[int, int] = (84, 112)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def arrays(trunk) -> list[np.ndarray]:
    """Copies of a trunk's keys and values."""
    return [tensor.numpy().copy() for tensor in trunk.cache]


@pytest.fixture(scope="module")
def trunk(model):
    return model.trunk([picture(0)], tasks.TRUNK_OPEN + PICTURE + FACTS + tasks.ASSISTANT)


def branches(model) -> list[Branch]:
    rows, parts = model.columns_grammar(), model.options_grammar(PARTS)
    found = [Branch(tasks.mark_key(mark), parts) for mark in "ABC"]
    return found + [Branch(tasks.row_key("front", row), rows) for row in range(16)]


@pytest.mark.parametrize(
    ("images", "text"),
    [(0, PICTURE), (1, "marks"), (2, PICTURE), (1, PICTURE + PICTURE)],
)
def test_images_must_match_the_placeholders(model, images, text):
    with pytest.raises(ModelError, match="images do not match the text"):
        model.trunk([picture(n) for n in range(images)], text)


def test_an_image_off_the_token_grid_is_an_error(model):
    with pytest.raises(ModelError, match="multiples of 28"):
        model.trunk([picture(0, (84, 100))], PICTURE)


def test_unknown_words_are_an_error_not_a_guess(model, trunk):
    with pytest.raises(ModelError, match="does not know"):
        model.trunk([], "marks of a sprocket")
    with pytest.raises(ModelError, match="does not know"):
        model.decode_branches(trunk, [Branch("G:", model.options_grammar(PARTS))])


def test_extending_equals_reading_at_once(model):
    whole = model.trunk([picture(0)], tasks.TRUNK_OPEN + PICTURE + FACTS + tasks.ASSISTANT)
    parts = model.trunk([], tasks.TRUNK_OPEN)
    parts = model.extend(parts, PICTURE, [picture(0)])
    parts = model.extend(model.extend(parts, FACTS), tasks.ASSISTANT)
    assert parts.ids == whole.ids
    assert parts.position == whole.position
    gap = max(np.abs(a - b).max() for a, b in zip(arrays(parts), arrays(whole), strict=True))
    assert gap < 1e-4


def test_a_trunk_is_not_changed_by_what_follows_it(model, trunk):
    before = arrays(trunk)
    first = model.decode_branches(trunk, branches(model))
    model.extend(trunk, FACTS)
    assert model.decode_branches(trunk, branches(model)) == first
    assert all((a == b).all() for a, b in zip(arrays(trunk), before, strict=True))


def test_another_picture_changes_the_answer_probabilities(model, trunk):
    text = tasks.TRUNK_OPEN + PICTURE + FACTS + tasks.ASSISTANT
    other = model.trunk([picture(7)], text)
    ours, theirs = (model.score_lines(t, {"A:": PARTS})["A:"] for t in (trunk, other))
    assert max(abs(ours[part] - theirs[part]) for part in PARTS) > 1e-3


def test_pictures_of_two_sizes_share_a_trunk(model):
    images = [picture(0), picture(1, (56, 84)), picture(2)]
    text = "marks" + PICTURE + "top" + PICTURE + PICTURE
    together = model.trunk(images, text)
    step = model.extend(model.trunk(images[:1], "marks" + PICTURE), "top" + PICTURE, images[1:2])
    step = model.extend(step, PICTURE, images[2:])
    assert step.ids == together.ids
    gap = max(np.abs(a - b).max() for a, b in zip(arrays(step), arrays(together), strict=True))
    assert gap < 1e-4


def test_branches_packed_equal_branches_alone(model, trunk):
    together = model.decode_branches(trunk, branches(model))
    for branch, result in zip(branches(model), together, strict=True):
        (alone,) = model.decode_branches(trunk, [branch])
        assert alone.text == result.text
        assert alone.logprob == pytest.approx(result.logprob, abs=1e-4)
        assert alone.raw_logprob == pytest.approx(result.raw_logprob, abs=1e-4)
        assert result.key == branch.key


def test_finished_branches_are_not_fed_again(model, trunk):
    rows = [
        Branch(tasks.row_key("front", row), model.columns_grammar(), row_threshold=1.01)
        for row in range(16)
    ]
    assert all(r.text == "none" for r in model.decode_branches(trunk, rows))
    assert (model.stats.passes, model.stats.tokens) == (1, 32)


def test_scores_in_one_pass_equal_decoding(model, trunk):
    (result,) = model.decode_branches(
        trunk,
        [Branch("A:", model.options_grammar(PARTS), beams=5)],
        Limits(min_alternative=0.0),
    )
    scores = model.score_lines(trunk, {"A:": PARTS})["A:"]
    assert sum(scores.values()) == pytest.approx(1, abs=1e-6)
    assert dict(result.alternatives) == pytest.approx(scores, abs=1e-5)
    assert result.text == max(scores, key=lambda part: scores[part])


def test_soft_rows_agree_with_the_decoder_on_what_both_know(model, trunk):
    keys = [tasks.row_key("side", row) for row in range(16)]
    soft = model.soft_rows(trunk, keys)
    hard = model.decode_branches(trunk, [Branch(k, model.columns_grammar()) for k in keys])
    assert soft.cells.shape == (16, 16)
    assert soft.nonempty == pytest.approx([r.nonempty for r in hard], abs=1e-4)
    assert (soft.cells >= 0).all()
    assert (soft.cells.max(1) <= soft.nonempty + 1e-5).all()


def test_rows_below_the_floor_are_not_expanded(model, trunk):
    keys = [tasks.row_key("side", row) for row in range(4)]
    soft = model.soft_rows(trunk, keys, floor=1.1)
    assert soft.cells.sum(1) == pytest.approx(soft.nonempty, rel=1e-4)


def test_a_time_budget_stops_the_decoding(model, trunk):
    results = model.decode_branches(trunk, branches(model), Limits(time_budget_s=0.0))
    assert model.stats.passes == 1
    assert any(result.overrun for result in results)


def test_closing_twice_is_fine_and_using_it_afterwards_is_an_error(bundle):
    with VisionLanguageModel.open(bundle) as model:
        trunk = model.trunk([], "marks scale")
        assert model.provider == CPU
    model.close()
    with pytest.raises(ModelError, match="closed"):
        model.extend(trunk, "marks")
    with pytest.raises(ModelError, match="closed"):
        _ = model.provider


def test_a_provider_that_is_not_there_is_an_error(bundle):
    with pytest.raises(ModelError, match="not installed"):
        VisionLanguageModel.open(bundle, provider="NoSuchExecutionProvider")


def test_threads_do_not_change_the_answer(bundle, model, trunk):
    with VisionLanguageModel.open(bundle, threads=2, provider=CPU) as other:
        theirs = other.trunk([picture(0)], tasks.TRUNK_OPEN + PICTURE + FACTS + tasks.ASSISTANT)
        scores = other.score_lines(theirs, {"A:": PARTS})["A:"]
    assert scores == pytest.approx(model.score_lines(trunk, {"A:": PARTS})["A:"], abs=1e-5)


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_graph_that_is_none_is_a_bundle_error(tmp_path, content):
    path = tmp_path / "decoder.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"cannot be loaded \(decoder\.onnx\)"):
        Graph(path)


def test_wrong_inputs_name_their_shapes(model):
    with pytest.raises(ModelError, match=r"vision\.onnx.*pixel_values.*\[1, 2, 3\]"):
        model._vision.run({"pixel_values": np.zeros((1, 2, 3), np.uint8)})
