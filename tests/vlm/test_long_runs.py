"""Part after part: the same answer to the last bit, and no growth."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from forge_station.contract import tasks
from forge_station.vlm import model as model_module
from forge_station.vlm.decode import Branch
from forge_station.vlm.model import VisionLanguageModel

PARTS = ("hex_bolt M8", "hex_bolt M8x20", "hex_nut M8")
PREFIX = tasks.TRUNK_OPEN + tasks.IMAGE_OPEN
TEXT = PREFIX + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE + "marks" + tasks.ASSISTANT
PICTURE = np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8)


def inspect(model: VisionLanguageModel) -> tuple[object, ...]:
    """Everything that a part asks, as numbers."""
    trunk = model.trunk([PICTURE], TEXT)
    rows = [Branch(tasks.row_key("front", row), model.columns_grammar()) for row in range(4)]
    soft = model.soft_rows(trunk, [branch.key for branch in rows])
    return (
        model.score_lines(trunk, {"A:": PARTS}),
        model.decode_branches(model.extend(trunk, "marks"), rows),
        soft.cells.tobytes(),
    )


def resident_kb() -> int:
    gc.collect()
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


def test_every_repeat_gives_the_same_bits_also_with_threads_and_in_a_new_session(bundle):
    first = None
    for _ in range(2):
        with VisionLanguageModel.open(bundle, threads=2, prefix=PREFIX) as model:
            for _ in range(5):
                found = inspect(model)
                first = first or found
                assert found == first


def test_memory_does_not_grow_with_the_parts(bundle):
    """A trunk has 0.1 MB here: keeping one a part, or the output of one pass, would show."""
    with VisionLanguageModel.open(bundle, prefix=PREFIX) as model:
        trunk = model.trunk([PICTURE], TEXT)
        part_kb = sum(tensor.numpy().nbytes for tensor in trunk.cache) / 1024
        for _ in range(15):
            inspect(model)
        before, parts = resident_kb(), 30
        for _ in range(parts):
            inspect(model)
        assert resident_kb() - before < 0.3 * parts * part_kb


def test_grammars_are_bounded_and_the_ones_in_use_stay(bundle, monkeypatch):
    monkeypatch.setattr(model_module, "_MOST_GRAMMARS", 4)
    with VisionLanguageModel.open(bundle) as model:
        rows = model.columns_grammar()
        for number in range(20):
            model.options_grammar([str(number), "none"])
            assert model.columns_grammar() is rows
            assert len(model._grammars) <= 4


def test_the_prefix_is_read_once_and_changes_nothing(bundle):
    with (
        VisionLanguageModel.open(bundle) as plain,
        VisionLanguageModel.open(bundle, prefix=PREFIX) as model,
    ):
        fed = []
        step = model._step
        model._step = lambda embeds, *rest: fed.append(len(embeds)) or step(embeds, *rest)
        ours, theirs = model.trunk([PICTURE], TEXT), plain.trunk([PICTURE], TEXT)
        assert (ours.ids, ours.position) == (theirs.ids, theirs.position)
        assert fed == [len(theirs.ids) - len(plain.codec.encode(PREFIX))]
        gaps = zip(ours.cache, theirs.cache, strict=True)
        assert max(np.abs(a.numpy() - b.numpy()).max() for a, b in gaps) < 1e-4
        other = model.trunk([], "marks scale")  # a text that begins otherwise
        assert other.ids == plain.trunk([], "marks scale").ids
