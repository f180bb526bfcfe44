"""Exported graphs against transformers in float32: pictures, logits, packed branches, decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from export import decoder, verify
from export.bundle import Release, write_bundle
from export.network import read_network
from export.quantize import Storage
from export.reference import Reference
from export.tensors import Checkpoint
from forge_station.contract import tasks
from forge_station.vlm.decode import Branch
from forge_station.vlm.engine import Graph
from forge_station.vlm.model import VisionLanguageModel
from forge_station.vlm.preprocess import (
    VisionGeometry,
    normalised_patches,
    patchify,
    vision_layout,
)

LIMIT = 1e-4
PARTS = ("hex_bolt M8", "hex_bolt M8x20", "hex_bolt M8x30", "hex_nut M8", "pin M5x20")


@pytest.fixture(scope="module", params=["nano", "large"])
def pair(request, tmp_path_factory):
    """A float32 bundle and the checkpoint in transformers."""
    checkpoint = request.getfixturevalue(request.param)
    out = tmp_path_factory.mktemp("parity") / "bundle"
    write_bundle(checkpoint, out, Release(request.param, "0.1.0", 1, "fp32"))
    with VisionLanguageModel.open(out) as model:
        yield model, Reference(checkpoint, model.geometry)


def case_of(model, name: str, *sizes: tuple[int, int]) -> verify.Case:
    rng = np.random.default_rng(3)
    images = tuple(verify.random_image(rng, size) for size in sizes)
    parts, rows = model.options_grammar(PARTS), model.columns_grammar()
    branches = [Branch(tasks.mark_key(mark), parts) for mark in "ABC"]
    branches += [Branch(tasks.row_key("front", row), rows) for row in range(4)]
    facts = tasks.sheet_facts({"A": (20.0, 13.0, 6.8)}, 0.35)
    return verify.Case(name, images, verify.trunk_text(facts, len(sizes)), tuple(branches))


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [(168, 336)],
        [(28, 28)],
        [(140, 196)],
        [(112, 112), (112, 112)],
        [(84, 56), (140, 196), (84, 56)],
    ],
    ids=str,
)
def test_everything_equals_transformers(pair, sizes):
    model, reference = pair
    case = case_of(model, "case", *sizes)
    if sizes:
        agreements, gap = verify.compare(model, reference, case)
    else:
        trunk = model.trunk([], case.text)
        segments = [model.codec.encode(f"{key} hex_nut M8\n") for key in ("A:", "B:")]
        ours = np.concatenate(model.forward(trunk, segments))
        packed = np.concatenate(reference.packed_logits([], trunk.ids, segments))
        alone = np.concatenate([reference.alone_logits([], trunk.ids, s) for s in segments])
        agreements = [
            verify.Agreement.of("packed", ours, packed),
            verify.Agreement.of("alone", ours, alone),
        ]
        gap = 0.0
    for agreement in agreements:
        assert agreement.max_diff < LIMIT, agreement
        assert agreement.reference_std > 0.1, "the reference says something"
    assert gap < LIMIT


def test_positions_equal_transformers(pair):
    model, reference = pair
    case = case_of(model, "case", (84, 56), (140, 196))
    assert verify.positions_agree(model, reference, case)


@pytest.mark.parametrize("size", [(28, 28), (84, 140)])
def test_patches_equal_the_published_image_processor(size):
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    processor = Qwen2VLImageProcessorPil()
    given = processor(images=[image], return_tensors="np", do_resize=False)
    assert given["image_grid_thw"].tolist() == [[1, size[0] // 14, size[1] // 14]]
    ours = normalised_patches(image, VisionGeometry())
    assert np.abs(ours - given["pixel_values"]).max() < 1e-6


def test_a_wrong_picture_is_noticed(pair):
    """The negative control: parity that would pass on any input proves nothing."""
    model, reference = pair
    case = case_of(model, "case", (84, 112))
    other = dataclasses.replace(case, images=(255 - case.images[0],))
    embeds = np.concatenate(model.embed_images(case.images))
    theirs = np.concatenate(reference.image_embeds(other.images))
    assert verify.Agreement.of("other", embeds, theirs).max_diff > 100 * LIMIT


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.06), ("w4a16", 0.6)])
def test_quantised_bundles_stay_near(pair, tmp_path, precision, bound):
    _, reference = pair
    folder = Path(reference.model.config.name_or_path)
    write_bundle(folder, tmp_path / "b", Release("q", "0.1.0", 1, precision))
    with VisionLanguageModel.open(tmp_path / "b") as model:
        agreements, _ = verify.compare(model, reference, case_of(model, "case", (84, 112)))
    for agreement in agreements:
        assert 0 < agreement.relative_l2 < bound, agreement


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch about itself
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_torch_exporter_gives_the_same_vision_graph(pair, tmp_path):
    from export.vision_torch import write_vision

    model, reference = pair
    checkpoint = Checkpoint(Path(reference.model.config.name_or_path))
    network = read_network(checkpoint.folder).vision
    write_vision(checkpoint, network, tmp_path / "vision.onnx")
    graph = Graph(tmp_path / "vision.onnx")
    for size in ((140, 196), (112, 224)):
        images = [verify.random_image(np.random.default_rng(n), size) for n in range(2)]
        layout = vision_layout(*model.geometry.grid(*size), model.geometry)
        patches = [patchify(image, model.geometry)[layout.source] for image in images]
        (theirs,) = graph.run(
            {
                "pixel_values": np.stack(patches),
                "valid": layout.valid,
                "pos_hw": layout.position,
                "out_index": layout.out_index,
            }
        )
        assert np.abs(theirs - np.stack(model.embed_images(images))).max() < LIMIT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch about itself
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_torch_exporter_gives_the_same_decoder(pair, tmp_path):
    from export.decoder_torch import write_decoder

    _, reference = pair
    folder = Path(reference.model.config.name_or_path)
    text = read_network(folder).text
    ours, theirs = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    decoder.write_decoder(Checkpoint(folder), text, ours, Storage(0))
    write_decoder(reference.model, theirs)
    graphs = [Graph(ours), Graph(theirs)]
    assert graphs[0].inputs.keys() == graphs[1].inputs.keys()
    assert graphs[0].outputs == graphs[1].outputs
    rng = np.random.default_rng(5)
    # A trunk, branches that do not see one another behind a past, and one token.
    for tokens, past, hidden in ((9, 0, 0.0), (6, 11, 0.4), (1, 4, 0.0)):
        bias = np.triu(np.full((tokens, past + tokens), -1e9, np.float32), past + 1)
        bias[:, :past][rng.random((tokens, past)) < hidden] = -1e9
        shape = (1, text.kv_heads, past, text.head_dim)
        feeds = {
            "inputs_embeds": rng.normal(size=(1, tokens, text.hidden_size)).astype(np.float32),
            "position_ids": rng.integers(0, 40, (3, 1, tokens)),
            "attention_bias": bias[None, None],
            "logit_positions": rng.integers(0, tokens, (1, 3)),
        }
        for name in graphs[0].inputs:
            if name.startswith("past."):
                feeds[name] = rng.normal(size=shape).astype(np.float32)
        results = [graph.run(feeds, graphs[0].outputs) for graph in graphs]
        for one, two in zip(*results, strict=True):
            assert one.shape == two.shape
            assert np.abs(one - two).max() < LIMIT
        assert results[0][0].std() > 0.1
