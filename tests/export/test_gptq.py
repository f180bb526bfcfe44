"""Better 4-bit weights: what each method promises, and that the follower computes as the graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from export import gptq
from export.decoder import write_decoder
from export.network import read_network
from export.quantize import (
    Nearest,
    Storage,
    dequantize,
    hqq_scales,
    quantize_blocks,
)
from export.sequences import Sequence, sequences
from export.tensors import Checkpoint
from export.vision import write_vision
from forge_station.errors import InputError
from forge_station.vlm.engine import Graph
from forge_station.vlm.recorded import Line, Question
from forge_station.vlm.text import TextCodec

TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>marks scale 0.35"


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    """Heavy tails, as trained weights have them."""
    return np.random.default_rng(0).standard_t(4, size=(48, 96)).astype(np.float32)


def correlated(tokens: int, width: int) -> torch.Tensor:
    rng = np.random.default_rng(1)
    mixed = rng.normal(size=(tokens, 8)) @ rng.normal(size=(8, width))
    return torch.from_numpy(mixed + 0.1 * rng.normal(size=(tokens, width))).float()


def test_hqq_moves_less_of_the_weight_that_matters_to_it(weight):
    near, fitted = quantize_blocks(weight, 4), quantize_blocks(weight, 4, scales=hqq_scales)
    gaps = [np.abs(dequantize(blocks) - weight) for blocks in (near, fitted)]
    assert (gaps[1] ** 0.7).sum() < 0.99 * (gaps[0] ** 0.7).sum()
    assert fitted.values.shape == near.values.shape and fitted.scales.dtype == np.float32


def test_hqq_keeps_what_is_exact_and_zero():
    levels = np.random.default_rng(2).integers(-8, 8, (4, 64)).astype(np.float32)
    levels[:, 0] = levels[:, 32] = -8
    exact = levels * 0.25
    assert (dequantize(quantize_blocks(exact, 4, scales=hqq_scales)) == exact).all()
    nothing = np.zeros((2, 32), np.float32)
    assert (dequantize(quantize_blocks(nothing, 4, scales=hqq_scales)) == 0).all()


def test_gptq_loses_less_of_the_output_than_rounding(weight):
    x = correlated(400, 96)
    stored = gptq.quantize(weight, gptq._hessian([x[:200], x[200:]]), 4, 32)
    expected = x.numpy() @ weight.T
    losses = [
        np.linalg.norm(x.numpy() @ dequantize(blocks).T - expected)
        for blocks in (stored, quantize_blocks(weight, 4))
    ]
    assert losses[0] < 0.5 * losses[1]


def test_gptq_without_correlation_is_rounding(weight):
    stored = gptq.quantize(weight, torch.eye(96, dtype=torch.float64), 4, 32)
    near = quantize_blocks(weight, 4)
    assert (stored.values == near.values).mean() > 0.999  # ties may fall either way
    assert np.allclose(stored.scales, near.scales)


def test_the_factor_is_that_of_the_inverse():
    hessian = gptq._hessian([correlated(300, 40)])
    upper = gptq._inverse_factor(hessian).double()
    damped = hessian + gptq.DAMPING * hessian.diagonal().mean() * torch.eye(40)
    assert torch.allclose(upper, upper.triu())
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(40).double(), atol=1e-3)


def test_inputs_that_are_always_zero_are_harmless(weight):
    x = correlated(200, 96)
    x[:, 5] = 0
    stored = gptq.quantize(weight, gptq._hessian([x]), 4, 32)
    assert np.isfinite(dequantize(stored)).all()


def test_a_width_that_is_no_multiple_is_an_error(weight):
    with pytest.raises(InputError, match="multiple of the block"):
        gptq.quantize(weight[:, :50], torch.eye(50, dtype=torch.float64), 4, 32)


@pytest.fixture(params=["nano", "large"])
def calibration(request, tmp_path):
    """A checkpoint with its vision graph, embedding table and two questions as sequences."""
    checkpoint = Checkpoint(request.getfixturevalue(request.param))
    network = read_network(checkpoint.folder)
    codec = TextCodec.open(checkpoint.folder / "tokenizer.json")
    write_vision(checkpoint, network.vision, tmp_path / "vision.onnx", Storage(0))
    table = checkpoint.read("model.language_model.embed_tokens.weight")
    np.save(tmp_path / "embed.npy", table)
    image = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
    lines = (Line("A:", " hex_nut M8\n"), Line("front r1:", " 5,6\n"), Line("class:", " dent\n"))
    questions = [Question(TEXT, (image,), lines), Question(TEXT, (255 - image,), lines[1:])]
    files = (tmp_path / "embed.npy", tmp_path / "vision.onnx")
    found = sequences(questions, codec, *files, network.vision.geometry)
    return checkpoint, network, found


def run_decoder(path, network, sequence: Sequence) -> np.ndarray:
    """Logits of the answers of a sequence, by ONNX Runtime."""
    graph = Graph(path)
    text = network.text
    empty = np.zeros((1, text.kv_heads, 0, text.head_dim), np.float32)
    feeds = {name: empty for name in graph.inputs if name.startswith("past.")}
    feeds["inputs_embeds"] = sequence.embeds[None]
    feeds["position_ids"] = sequence.positions[:, None]
    feeds["attention_bias"] = sequence.bias[None, None]
    feeds["logit_positions"] = sequence.answers[None]
    return graph.run(feeds, ["logits"])[0][0]


def test_the_follower_computes_what_the_graph_computes(calibration, tmp_path):
    checkpoint, network, found = calibration
    follower = gptq.Gptq(checkpoint, network.text, found)
    kept: dict[str, np.ndarray] = {}

    class Keeping:
        def __call__(self, name, weight, bias, bits, block):
            stored = follower(name, weight, bias, bits, block)
            kept[name] = dequantize(stored)
            return stored

    # 8 bits of a block size that leaves no error worth naming, computed in float32.
    storage = Storage(8, unpacked=True)
    write_decoder(checkpoint, network.text, tmp_path / "d.onnx", storage, quantizer=Keeping())
    for hidden, sequence in zip(follower._inputs("lm_head"), found, strict=True):
        ours = hidden.numpy() @ kept["lm_head"].T
        theirs = run_decoder(tmp_path / "d.onnx", network, sequence)
        assert theirs.std() > 0.1
        assert np.abs(ours - theirs).max() < 1e-4


def test_gptq_brings_the_whole_decoder_nearer_on_what_it_was_calibrated_with(calibration, tmp_path):
    checkpoint, network, found = calibration
    write_decoder(checkpoint, network.text, tmp_path / "full.onnx", Storage(0))
    gaps = []
    for name, quantizer in (
        ("near", Nearest()),
        ("gptq", gptq.Gptq(checkpoint, network.text, found)),
    ):
        path = tmp_path / f"{name}.onnx"
        write_decoder(checkpoint, network.text, path, Storage(4), quantizer=quantizer)
        full, own = (
            np.concatenate([run_decoder(file, network, sequence) for sequence in found])
            for file in (tmp_path / "full.onnx", path)
        )
        gaps.append(np.linalg.norm(own - full) / np.linalg.norm(full))
    assert 0 < gaps[1] < 0.8 * gaps[0]


def test_a_question_without_its_picture_is_refused(calibration, tmp_path):
    checkpoint, network, _ = calibration
    codec = TextCodec.open(checkpoint.folder / "tokenizer.json")
    bad = [Question(TEXT, (), (Line("A:", " hex_nut M8\n"),))]
    with pytest.raises(InputError, match=r"malformed.*1 pictures"):
        sequences(
            bad,
            codec,
            tmp_path / "embed.npy",
            tmp_path / "vision.onnx",
            network.vision.geometry,
        )
