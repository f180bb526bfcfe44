"""The race of peers: fair answers, ratios within a round, weights counted, and one short run."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from export import bench
from export.bench import Naive, Question
from export.bundle import Release, write_bundle
from forge_station.contract import tasks
from forge_station.vlm.model import DECODER, VisionLanguageModel

TEXT = tasks.TRUNK_OPEN + tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE


@pytest.fixture(scope="module")
def bundle(nano, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "bundle"
    write_bundle(nano, folder, Release("nano", "0.1.0", 1, "fp32"))
    return folder


def test_naive_and_transformers_write_the_same_tokens(nano, bundle):
    rng = np.random.default_rng(1)
    questions = [
        Question(rng.integers(0, 256, size, np.uint8), TEXT + text + tasks.ASSISTANT, tokens)
        for size, text, tokens in (((56, 84, 3), "marks", 7), ((112, 56, 3), "surface joint", 4))
    ]
    with VisionLanguageModel.open(bundle, prefix=tasks.TRUNK_OPEN) as model:
        naive, before = Naive(model), model.fed.passes
        eager = bench.transformers_peer(nano, model, 1)
        ours = [naive.answer(question) for question in questions]
        assert ours == eager(questions)
        assert [len(answer) for answer in ours] == [7, 4]
        assert naive.fed.passes - before == 7 + 4  # a prompt gives the first token


def test_a_ratio_is_the_median_of_those_within_a_round_and_part():
    """(wall, CPU) of two parts: 3, 3.1, 2 and 5 times the station's wall time, half of its CPU."""
    one = {"station": [(1.0, 2.0), (10.0, 20.0)], "naive": [(3.0, 1.0), (31.0, 10.0)]}
    two = {"station": [(1.0, 2.0), (1.0, 2.0)], "naive": [(2.0, 1.0), (5.0, 1.0)]}
    found = bench.figures([one, two])
    assert found["times_faster"] == {"naive": 3.05}
    assert found["times_less_cpu"] == {"naive": 0.5}
    assert found["median_ms"] == {"station": 1.0, "naive": 4.0}
    assert bench.figures([one])["times_faster"] == {"naive": 3.05}
    assert bench.figures([two])["times_faster"] == {"naive": 3.5}


def test_peers_take_turns_and_each_second_run_is_timed():
    calls: list[str] = []
    works = {
        part: {peer: lambda name=part + peer: calls.append(name) for peer in "ab"} for part in "xy"
    }
    times = bench.race(works, 3)
    assert calls == ["xa", "xa", "xb", "xb", "ya", "ya", "yb", "yb"] * 3
    assert all(len(rows) == 3 for part in times.values() for rows in part.values())


@pytest.mark.parametrize("precision", ["fp32", "int8", "w4a16"])
def test_weights_are_counted_whatever_they_are_packed_in(nano, tmp_path, precision):
    write_bundle(nano, tmp_path / "b", Release("nano", "0.1.0", 1, precision))
    numbers, size = bench.weights_of(tmp_path / "b" / DECODER)
    config = json.loads((nano / "config.json").read_text())["text_config"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = 4 * hidden**2 + 3 * hidden * inner
    assert numbers == config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    least = {"fp32": 4.0, "int8": 1.0, "w4a16": 0.5}[precision]
    assert least * numbers <= size < (least + 0.6) * numbers


def test_the_limits_of_the_machine_are_positive():
    assert bench.read_speed(1, mega_bytes=4) > 0
    assert bench.product_speed(1, side=64) > 0


def test_grid_lines_are_the_rows_that_are_not_empty():
    class Grid:
        view, cells = "top", ((0, 3), (0, 4), (9, 15))

    assert bench._grid_lines([Grid()]) == "top r1: 4,5\ntop r10: 16\n"


def test_a_run_on_the_shipped_bundle_ends_with_its_figures(repository):
    bundle = repository / "station_config/demo/bundle"
    done = subprocess.run(
        [sys.executable, "-m", "export.bench", "--bundle", bundle, "--rounds", "1"],
        capture_output=True,
        text=True,
        check=True,
        cwd=repository,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["parts"]) == {"sound", "cut", "bent"}
    for part in found["parts"].values():
        spent = part["median_cpu_ms"]
        expected = spent["naive"] / spent["station"]
        assert part["times_less_cpu"]["naive"] == pytest.approx(expected, rel=0.02)
    assert {len(tokens) for tokens in found["answer_tokens"].values()} == {3}
    assert found["not_run"]["transformers"] == "no --checkpoint was given"
    assert "station is" in done.stdout


def test_a_checkpoint_that_is_not_there_is_one_clear_error(repository, tmp_path):
    bundle = repository / "station_config/demo/bundle"
    done = subprocess.run(
        [sys.executable, "-m", "export.bench", "--bundle", bundle,
         "--checkpoint", tmp_path / "none"],
        capture_output=True, text=True, check=False, cwd=repository,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no such checkpoint folder" in done.stderr
