"""What each target is given: its precisions, its operators, and graphs that compute the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from export import targets
from export.bundle import Release, write_bundle
from export.network import read_network
from export.quantize import Storage, storage
from export.targets import PRECISIONS, TARGETS
from export.tensors import Checkpoint
from export.vision import write_vision
from forge_station.errors import InputError, ModelError
from forge_station.vlm.engine import CPU
from forge_station.vlm.model import VisionLanguageModel
from tests.export.test_parity import LIMIT, case_of


def release(target: str, precision: str, **more) -> Release:
    return Release("nano", "0.1.0", target=target, precision=precision, **more)


@pytest.mark.parametrize(
    ("target", "precision", "pattern"),
    [
        ("cpu", "fp16", r"target cpu.*fp32, int8, w4a16, got fp16.*crashes on float16"),
        ("tensorrt", "w4a16", "TensorRT does not have"),
        ("openvino", "w4a16", "OpenVINO does not have"),
        ("npu", "fp32", "target.*cpu, cuda, tensorrt, openvino"),
        ("cuda", "int3", r"precision.*got int3"),
    ],
)
def test_what_a_target_does_not_run_is_refused(nano, tmp_path, target, precision, pattern):
    with pytest.raises(InputError, match=pattern):
        write_bundle(nano, tmp_path / "b", release(target, precision))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"quantizer": "awq"}, "rtn, hqq, gptq"),
        ({"quantizer": "hqq", "precision": "int8"}, "for 4-bit weights"),
        ({"quantizer": "gptq"}, "takes a calibration file"),
        ({"quantizer": "hqq", "calibration": "q.npz"}, "takes a calibration file"),
    ],
)
def test_what_a_quantizer_does_not_take_is_refused(nano, tmp_path, more, pattern):
    chosen = dataclasses.replace(release("cpu", "w4a16"), **more)
    with pytest.raises(InputError, match=pattern):
        write_bundle(nano, tmp_path / "b", chosen)


def graphs_of(folder) -> list[onnx.ModelProto]:
    names = ("vision.onnx", "decoder.onnx")
    return [onnx.load(folder / name, load_external_data=False) for name in names]


def types_of(graph: onnx.ModelProto, kind: str) -> set[int]:
    """Element types of initializers that products of `kind` take as weights."""
    by_name = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    inputs = [node.input[1] for node in graph.graph.node if node.op_type == kind]
    return {by_name[name] for name in inputs if name in by_name}


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_other_runtimes_get_standard_operators_only(large, tmp_path, target):
    for precision in TARGETS[target].precisions:
        manifest = write_bundle(large, tmp_path / precision, release(target, precision))
        assert manifest.model["target"] == target
        for graph in graphs_of(tmp_path / precision):
            assert {node.domain for node in graph.graph.node} == {""}
            assert {item.domain for item in graph.opset_import} == {""}
        for name in ("vision.onnx", "decoder.onnx"):
            onnx.checker.check_model(tmp_path / precision / name, full_check=True)


@pytest.mark.parametrize("name", ["nano", "large"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_standard_operators_compute_the_same(request, tmp_path, name, precision):
    checkpoint = request.getfixturevalue(name)
    models = []
    for target in ("cpu", "openvino"):
        write_bundle(checkpoint, tmp_path / target, release(target, precision))
        models.append(VisionLanguageModel.open(tmp_path / target))
    with models[0] as fused, models[1] as plain:
        case = case_of(fused, "case", (84, 112))
        embeds = [np.concatenate(m.embed_images(case.images)) for m in (fused, plain)]
        assert np.abs(embeds[0] - embeds[1]).max() < LIMIT
        trunk = fused.trunk(case.images, case.text)
        segments = [fused.codec.encode(f"{key} hex_nut M8\n") for key in ("A:", "B:")]
        first = np.concatenate(fused.forward(trunk, segments))
        second = np.concatenate(plain.forward(plain.trunk(case.images, case.text), segments))
        assert first.std() > 0.1
        assert np.abs(first - second).max() < LIMIT
        answers = [m.decode_branches(m.trunk(case.images, case.text), case.branches)
                   for m in (fused, plain)]  # fmt: skip
        assert [r.text for r in answers[0]] == [r.text for r in answers[1]]


def test_float16_is_for_weights_and_products_alone(nano, tmp_path):
    write_bundle(nano, tmp_path / "b", release("cuda", "fp16"))
    half, full = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for graph in graphs_of(tmp_path / "b"):
        own = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
        norms = [name for name in own if "norm" in name or "ln_q" in name]
        assert norms and {own[name] for name in norms} == {full}
        assert half in types_of(graph, "MatMul")
        outputs = {
            node.op_type for node in graph.graph.node
            for source in graph.graph.node
            if source.op_type == "MatMul" and source.output[0] in node.input
            and source.input[1] in own and own[source.input[1]] == half
        }  # fmt: skip
        assert outputs == {"Cast"}, "every float16 product goes back to float32 at once"
        sides = [*graph.graph.input, *graph.graph.output]
        assert half not in {side.type.tensor_type.elem_type for side in sides}


def test_packed_weights_for_cuda_multiply_in_float16(nano, tmp_path):
    write_bundle(nano, tmp_path / "b", release("cuda", "w4a16"))
    vision, decoder = graphs_of(tmp_path / "b")
    own = {tensor.name: tensor.data_type for tensor in decoder.graph.initializer}
    packed = [node for node in decoder.graph.node if node.op_type == "MatMulNBits"]
    assert packed and {own[node.input[2]] for node in packed} == {onnx.TensorProto.FLOAT16}
    assert types_of(vision, "MatMul") >= {onnx.TensorProto.FLOAT16}


def test_half_storage_is_for_packed_weights():
    assert storage(4, 1000, half=True) == Storage(4, half=True)
    assert storage(16, 1000, half=True) == Storage(16)
    assert storage(8, 1000, half=True) == Storage(8, unpacked=True)
    assert storage(8, 10**9, half=True) == Storage(8, half=True)


@pytest.mark.parametrize("precision", ["fp16", "w4a16"])
def test_float16_is_never_offered_to_the_cpu(nano, tmp_path, precision):
    write_bundle(nano, tmp_path / "b", release("cuda", precision))
    for provider in ("auto", CPU):
        with pytest.raises(ModelError, match=r"CUDAExecutionProvider"):
            VisionLanguageModel.open(tmp_path / "b", provider=provider)


def test_float16_weights_stay_near(nano, tmp_path):
    """The graph's own arithmetic, without the optimisations that crash on a CPU."""
    import onnxruntime as ort

    checkpoint = Checkpoint(nano)
    network = read_network(nano)
    results = []
    for bits in (0, 16):
        path = tmp_path / f"{bits}.onnx"
        write_vision(checkpoint, network.vision, path, Storage(bits))
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        length = network.vision.geometry.slots * 2
        rng = np.random.default_rng(0)
        feeds = {
            "pixel_values": rng.integers(0, 256, (1, length, 588), np.uint8),
            "valid": np.ones(length, np.float32),
            "pos_hw": np.zeros((length, 2), np.int64),
            "out_index": np.arange(length // 4),
        }
        results.append(session.run(None, feeds)[0])
    gap = np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0])
    assert 0 < gap < 5e-3


def test_every_precision_has_a_target():
    assert set(PRECISIONS) == {"fp32", "fp16", "int8", "w4a16"}
    assert targets.bits_of("cuda", "w4a16").vision == 16


OPENVINO = """
import json, sys
import numpy as np
import openvino as ov
folder, feeds = sys.argv[1], np.load(sys.argv[2])
core = ov.Core()
config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
out = {}
for name in ("vision", "decoder"):
    model = core.compile_model(f"{folder}/{name}.onnx", "CPU", config)
    given = {i.any_name: feeds[f"{name}:{i.any_name}"] for i in model.inputs}
    result = model(given)
    out[name] = result["image_embeds" if name == "vision" else "logits"]
np.savez(sys.argv[3], **out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_openvino_reads_the_graphs(large, tmp_path, openvino_python, precision):
    """In an environment of its own: nothing of ours is in it."""
    import subprocess

    write_bundle(large, tmp_path / "b", release("openvino", precision))
    network = read_network(large)
    rng = np.random.default_rng(0)
    text, slots = network.text, network.vision.geometry.slots
    length, total = 2 * slots, 9
    bias = np.triu(np.full((total, total), -1e9, np.float32), 1)[None, None]
    feeds = {
        "vision:pixel_values": rng.integers(0, 256, (2, length, 588), np.uint8),
        "vision:valid": np.ones(length, np.float32),
        "vision:pos_hw": rng.integers(0, 8, (length, 2)),
        "vision:out_index": np.arange(length // 4 - 1),
        "decoder:inputs_embeds": rng.normal(size=(1, total, text.hidden_size)).astype(np.float32),
        "decoder:position_ids": np.broadcast_to(np.arange(total), (3, 1, total)).copy(),
        "decoder:attention_bias": bias,
        "decoder:logit_positions": np.array([[3, 8]]),
    }
    empty = np.zeros((1, text.kv_heads, 0, text.head_dim), np.float32)
    for layer in range(text.layers):
        feeds |= {f"decoder:past.{layer}.{part}": empty for part in ("key", "value")}
    np.savez(tmp_path / "feeds.npz", **feeds)
    command = [openvino_python, "-c", OPENVINO, *map(str, (tmp_path / "b", tmp_path / "feeds.npz",
               tmp_path / "out.npz"))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.load(tmp_path / "out.npz")
    from forge_station.vlm.engine import Graph

    for name, output in (("vision", "image_embeds"), ("decoder", "logits")):
        own = {key.partition(":")[2]: value for key, value in feeds.items()
               if key.startswith(f"{name}:")}  # fmt: skip
        (ours,) = Graph(tmp_path / "b" / f"{name}.onnx").run(own, [output])
        assert ours.std() > 0.1
        assert np.abs(ours - theirs[name]).max() < 1e-3 * np.abs(ours).max()
