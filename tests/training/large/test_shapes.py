"""The dry run: counts of the published shapes, the sharding plan, memory computed by hand."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

from tests.training.large import small
from training.large import shapes, sharding
from training.large.checkpoint import RunError
from training.large.shapes import Load


def test_the_3b_shape_has_the_weights_of_the_published_model() -> None:
    model = shapes.meta_model(shapes.shape_config("3b"))
    groups = {group.name: group for group in shapes.plan(model)}
    assert sum(p.numel() for p in model.parameters()) == 3_754_622_976
    layer = 2 * 2048 + (2048 + 1) * 2048 + 2 * (2048 + 1) * 256 + 2048**2 + 3 * 2048 * 11008
    assert groups["Qwen2_5_VLDecoderLayer"] == shapes.Group("Qwen2_5_VLDecoderLayer", 36, layer)
    assert groups["Qwen2_5_VLVisionBlock"].count == 32


def test_the_plan_wraps_the_classes_of_the_sharding_settings() -> None:
    assert sharding.fsdp_config()["transformer_layer_cls_to_wrap"] == list(sharding.BLOCKS)
    with pytest.raises(RunError, match="Qwen2_5_VLVisionBlock"):
        shapes.plan(torch.nn.Linear(2, 2))


def test_memory_of_a_full_run_by_hand() -> None:
    config = shapes.shape_config("3b")
    model = shapes.meta_model(config)
    count = sum(p.numel() for p in model.parameters())
    found = shapes.memory(model, config, "full", 8, Load(1, 2048, 768))
    assert found["weights"] == found["gradients"] == count * 4 / 8
    assert found["optimizer"] == count * 8 / 8
    alone = shapes.memory(model, config, "full", 1, Load(1, 2048, 768))
    assert sum(alone[name] for name in ("weights", "gradients", "optimizer")) == 16 * count
    head = 151936 * 2048
    assert alone["gathered"] == 4 * head
    rest = count - 36 * 77_076_992 - 32 * 19_702_200
    assert found["gathered"] == 2 * (rest + 2 * 77_076_992) + 8 * head
    twice = shapes.memory(model, config, "full", 8, Load(2, 2048, 768))
    assert twice["activations"] == pytest.approx(2 * found["activations"])


def test_a_dry_run_of_both_shapes_ends_in_its_figures(capsys) -> None:
    for name, method in (("3b", "lora"), ("7b", "full")):
        words = f"--model {name}-shape --dry-run --gpus 8 --method {method} --micro 1"
        done = small.run(capsys, [*words.split(), "--dry-pictures", "16", "--dry-tokens", "256"])
        assert done["gpus"] == 8 and done["fits"]
        assert done["parameters"] == {"3b": 3_754_622_976, "7b": 8_292_166_656}[name]


def test_what_does_not_fit_is_said(capsys) -> None:
    words = "--model 7b-shape --dry-run --method full --gpus 1 --dry-pictures 16"
    done = small.run(capsys, words.split())
    assert not done["fits"] and done["gib_per_gpu"] > 120


def test_an_unknown_shape_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="expected 3b or 7b, got 72b"):
        small.command.main(["--model", "72b-shape", "--dry-run"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("FORGE_WIDE_TESTS" not in os.environ, reason="FORGE_WIDE_TESTS=1: 12 GB, 3 min")
@pytest.mark.parametrize(("method", "precision"), [("lora", "bf16"), ("full", "bf16")])
def test_one_step_at_the_true_widths_of_3b(method, precision, tmp_path, capsys) -> None:
    """Two layers of each tower; prints time and memory, which training/runs/README.md quotes."""
    from PIL import Image

    from training.data import examples

    one = small.surface_example("s0")
    examples.write(tmp_path / "e.jsonl", [one, small.surface_example("s1")])
    for name in ("s0", "s1"):
        Image.new("RGB", (224, 224)).save(tmp_path / f"{name}.png")
    count = shapes.write_random(tmp_path / "3b-cut", "3b", layers=2)
    words = f"--model {tmp_path}/3b-cut --examples {tmp_path}/e.jsonl --out {tmp_path}/run"
    words += f" --method {method} --precision {precision} --max-steps 1 --batch 1"
    begun = time.perf_counter()
    done = small.run(capsys, words.split())
    print(json.dumps({"parameters": count, "wall": round(time.perf_counter() - begun), **done}))
    assert done["steps"] == 1 and count > 500e6
    assert done["peak_rss_mb"] < 20_000
