"""Where a graph runs: proved from a profile, and refused where it is not what was asked for."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime as ort
import pytest

from forge_station.errors import ModelError
from forge_station.vlm import engine
from forge_station.vlm.engine import CPU, Graph, Placement
from forge_station.vlm.model import DECODER, VISION, VisionLanguageModel

CUDA = "CUDAExecutionProvider"


def node(provider: str, op: str) -> dict:
    return {"cat": "Node", "args": {"provider": provider, "op_name": op}}


@pytest.fixture
def cuda_in_name_only(monkeypatch):
    """ONNX Runtime built with CUDA on a machine without it: it warns and takes the CPU."""
    real = ort.get_available_providers()
    monkeypatch.setattr(engine.ort, "get_available_providers", lambda: [CUDA, *real])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Specified provider")
        yield


def test_asked_for_cuda_and_got_the_cpu_is_an_error_before_the_first_part(
    bundle, cuda_in_name_only
):
    with pytest.raises(ModelError, match=rf"could not start.*expected {CUDA}.*got {CPU}"):
        VisionLanguageModel.open(bundle, provider=CUDA)


def test_auto_takes_the_cpu_where_cuda_does_not_start_and_says_so(
    bundle, cuda_in_name_only, caplog
):
    with VisionLanguageModel.open(bundle) as model:
        assert model.provider == CPU
    assert f"{CUDA} does not start for {VISION}" in caplog.text


def test_a_provider_that_is_registered_and_runs_nothing_is_an_error(bundle):
    """The CPU wheel has such a one: `get_providers()` names it first, and no node runs there."""
    if "AzureExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no provider that takes no nodes")
    with pytest.raises(ModelError, match=rf"does not run the graph.*got {CPU} ran \d+"):
        VisionLanguageModel.open(bundle, provider="AzureExecutionProvider")


def test_the_profile_names_the_provider_of_every_product(bundle):
    with VisionLanguageModel.open(bundle, provider=CPU) as model:
        placement = model._decoder.check_placement()
    assert placement.provider == CPU
    assert set(placement.nodes) == set(placement.products) == {CPU}
    layers = model.manifest.model["layers"]
    # query, key, value, output, gate, up and down of each layer, and the two of its attention
    assert placement.products[CPU] >= 9 * layers


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([node(CUDA, "MatMul"), node(CPU, "Shape")], None),
        ([node(CUDA, "MatMul"), node(CPU, "MatMulNBits")], f"{CUDA} ran 1, {CPU} ran 1"),
        ([node(CPU, "Gemm")], f"{CPU} ran 1"),
        ([node(CUDA, "TRTKernel_graph_0"), node(CPU, "Gather")], None),
        ([node(CPU, "Gather")], "no matrix product"),
    ],
)
def test_what_counts_as_running_there(bundle, events, fault):
    graph = Graph(bundle / DECODER)
    graph.asked, graph.placement = CUDA, Placement.of_profile(events)
    if fault is None:
        assert graph.check_placement().provider == CUDA
        assert graph.provider == CUDA
    else:
        with pytest.raises(ModelError, match=fault):
            graph.check_placement()


def test_a_session_that_moved_since_it_was_proved_is_an_error(bundle):
    with VisionLanguageModel.open(bundle) as model:
        model._decoder._registered = (CUDA, CPU)
        with pytest.raises(ModelError, match=rf"has changed while running.*got {CPU}"):
            _ = model.provider


def test_a_failed_run_does_not_move_to_another_provider(bundle):
    assert Graph(bundle / DECODER)._session._enable_fallback is False


def test_bound_runs_equal_plain_runs_and_leave_their_inputs(bundle):
    graph = Graph(bundle / DECODER)
    rng = np.random.default_rng(0)
    past = {n: rng.normal(size=(1, s[1], 7, s[3])) for n, s in graph.inputs.items() if "past" in n}
    past = {name: array.astype(np.float32) for name, array in past.items()}
    hidden = graph.inputs["inputs_embeds"][2]
    feeds = {
        "inputs_embeds": rng.normal(size=(1, 2, hidden)).astype(np.float32),
        "position_ids": np.full((3, 1, 2), [7, 8], np.int64),
        "attention_bias": np.zeros((1, 1, 2, 9), np.float32),
        "logit_positions": np.array([[1]], np.int64),
    }
    kept = [name for name in graph.outputs if name.startswith("present.")]
    tensors = {name: graph.tensor(array) for name, array in past.items()}
    logits, present = graph.run_bound(feeds, tensors, "logits", kept)
    plain = graph.run({**feeds, **past}, ["logits", *kept])
    assert (logits == plain[0]).all()
    assert all((t.numpy() == array).all() for t, array in zip(present, plain[1:], strict=True))
    assert all((tensors[name].numpy() == array).all() for name, array in past.items())


def test_a_bound_run_that_fails_names_its_shapes(bundle):
    graph = Graph(bundle / DECODER)
    with pytest.raises(ModelError, match=r"decoder\.onnx.*inputs_embeds.*\[1, 2, 3\]"):
        graph.run_bound({"inputs_embeds": np.zeros((1, 2, 3), np.float32)}, {}, "logits")
