"""Writing a bundle: refusals leave nothing behind, and what is written opens."""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil

import numpy as np
import pytest

from export import bundle, model_card
from export.bundle import Release, write_bundle
from forge_station.contract import CONTRACT_VERSION
from forge_station.contract.error import StationError
from forge_station.contract.manifest import FileEntry, Manifest
from forge_station.contract.views import SURFACE_CHANNELS
from forge_station.errors import InputError
from forge_station.geometry import reference, reference_io
from forge_station.opening import open_inspector
from forge_station.vlm.bundle_files import read_manifest
from forge_station.vlm.model import VisionLanguageModel

RELEASE = Release("nano", "0.1.0", 3, "int8", created="2026-11-30T00:00:00Z")
LINE = """\
line: demo-line
products:
  - part_number: P1
    kind: batch
    checks: [workpiece]
    parts: {hex_nut M8: 3}
"""


@pytest.fixture
def checkpoint(nano, tmp_path):
    return shutil.copytree(nano, tmp_path / "checkpoint")


def refused(tmp_path, checkpoint, pattern, release=RELEASE, **options) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(StationError, match=pattern):
        write_bundle(checkpoint, out, release, **options)
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))


def drop_tensor(folder, name: str) -> None:
    path = folder / "model.safetensors"
    short = name.replace("language_model.", "").replace("model.visual", "visual")
    content = path.read_bytes()
    assert content.count(f'"{short}"'.encode()) == 1
    path.write_bytes(content.replace(f'"{short}"'.encode(), f'"{"x" * len(short)}"'.encode()))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.language_model.layers.1.self_attn.k_proj.bias",
        "model.visual.merger.mlp.2.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, checkpoint, name):
    drop_tensor(checkpoint, name)
    refused(tmp_path, checkpoint, f"lacks a tensor.*{name}")


@pytest.mark.parametrize(
    ("thresholds", "pattern"),
    [
        ({"row": 0.42}, r"thresholds\.row"),
        ({"look_again": 5}, "look_again: 5"),
        ({"look_again": float("nan")}, "look_again: nan"),
        ({"look_again": "often"}, r"thresholds\.look_again: 'often'"),
        ({"defect_unsure": 0.9}, "at most defect_fail"),
    ],
)
def test_operating_points_that_no_station_reads_are_refused(
    tmp_path, checkpoint, thresholds, pattern
):
    release = dataclasses.replace(RELEASE, thresholds=thresholds)
    refused(tmp_path, checkpoint, pattern, release)


def test_a_truncated_checkpoint_is_refused(tmp_path, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path, checkpoint, "truncated")


def test_a_config_of_another_size_is_refused(tmp_path, checkpoint):
    path = checkpoint / "config.json"
    path.write_text(
        path.read_text().replace('"intermediate_size": 512', '"intermediate_size": 480')
    )
    refused(tmp_path, checkpoint, r"another shape.*gate_proj.*\[480, 192\], got \[512, 192\]")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [(None, "lacks its tokenizer"), ("{", "tokenizer is not valid")],
)
def test_a_bad_tokenizer_is_refused(tmp_path, checkpoint, content, pattern):
    path = checkpoint / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    refused(tmp_path, checkpoint, pattern)


def test_the_tokenizer_of_another_model_is_refused(tmp_path, checkpoint):
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace('"image_token_id": 5', '"image_token_id": 4'))
    refused(tmp_path, checkpoint, "not the one of this checkpoint")


@pytest.mark.parametrize("text", ["[]", "{", '"x"'])
def test_a_bad_training_card_is_refused(tmp_path, checkpoint, text):
    (checkpoint / "training_card.json").write_text(text)
    refused(tmp_path, checkpoint, "training card")


@pytest.mark.parametrize("text", ["", "line: [", "line: x\nproducts: 3\n"])
def test_a_bad_line_file_is_refused(tmp_path, checkpoint, text):
    (tmp_path / "line.yaml").write_text(text)
    release = Release("nano", "0.1.0", line=tmp_path / "line.yaml")
    refused(tmp_path, checkpoint, r"line\.yaml", release)


def test_a_line_with_a_part_the_model_cannot_name_is_refused(tmp_path, checkpoint):
    (tmp_path / "line.yaml").write_text(LINE.replace("hex_nut M8", "cap_nut M8"))
    release = Release("nano", "0.1.0", line=tmp_path / "line.yaml")
    refused(tmp_path, checkpoint, "does not know.*cap_nut M8", release)


SURFACE_LINE = LINE.replace("kind: batch", "kind: single").replace("workpiece", "surface")
SURFACE_LINE = SURFACE_LINE.replace("{hex_nut M8: 3}", "{hex_nut M8: 1}")


def shown_the_difference(checkpoint) -> None:
    path = checkpoint / "training_card.json"
    card = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(card | {"surface_channels": SURFACE_CHANNELS}))


def references_of(path, *parts: str):
    depth = np.zeros((reference.TURNS + 1, reference.SIDE, reference.SIDE), np.float32)
    flat = reference.Reference((reference.RestView(depth, 0.1, 2.0),))
    reference_io.save(path, dict.fromkeys(parts, flat))
    return path


def test_a_model_that_compares_needs_a_reference_of_every_inspected_part(tmp_path, checkpoint):
    shown_the_difference(checkpoint)
    line = tmp_path / "line.yaml"
    line.write_text(SURFACE_LINE)
    refused(
        tmp_path, checkpoint, "without a reference.*hex_nut M8", Release("n", "1.0.0", line=line)
    )
    other = references_of(tmp_path / "other.npz", "hex_nut M10")
    release = Release("n", "1.0.0", line=line, references=other)
    refused(tmp_path, checkpoint, "a reference of hex_nut M8, got 1 references", release)
    right = references_of(tmp_path / "references.npz", "hex_nut M8")
    release = Release("n", "1.0.0", line=line, references=right)
    manifest = write_bundle(checkpoint, tmp_path / "b", release)
    assert manifest.surface_channels == SURFACE_CHANNELS
    assert manifest.files[reference_io.FILE].size == right.stat().st_size
    inspector = open_inspector(tmp_path / "b", checks_alone=True)
    assert set(inspector.references) == {"hex_nut M8"}
    inspector.model.close()


def test_a_line_whose_surfaces_are_not_inspected_needs_no_reference(tmp_path, checkpoint):
    shown_the_difference(checkpoint)
    (tmp_path / "line.yaml").write_text(LINE)
    write_bundle(checkpoint, tmp_path / "b", Release("n", "1.0.0", line=tmp_path / "line.yaml"))


def test_the_card_promises_what_was_measured_and_no_less(checkpoint):
    manifest = Manifest("nano", "0.1.0", 1, CONTRACT_VERSION, "int8", {"a": FileEntry.of(b"")})
    crack = {"flaws": 90, "hits": 80, "a90": 5.2, "a90_95": 6.81}
    dent = {"flaws": 12, "hits": 9, "reason": "too few sized flaws"}
    pod = {"unit": "px", "hit": "stopped", "curves": {"crack": crack, "dent": dent}}
    text = model_card.render(manifest, {}, {}, [pod])
    assert "| crack | 90 | 80 | 5.2 | 6.81 |" in text
    assert "| dent | 12 | 9 | - (too few sized flaws) | - |" in text
    assert "Promised sizes" not in model_card.render(manifest, {}, {})


def test_a_full_disk_is_noticed_before_work(tmp_path, checkpoint, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _folder: usage(10, 9, 1000))
    refused(tmp_path, checkpoint, r"not enough disk space.*MB")


@pytest.mark.parametrize(
    "release",
    [Release("nano", "0.1.0", precision="int3"), Release("Nano!", "0.1.0"), Release("nano", "one")],
)
def test_a_bad_release_is_refused(tmp_path, checkpoint, release):
    refused(tmp_path, checkpoint, r"precision|name|version", release)


def test_an_existing_folder_is_replaced_only_when_asked_and_only_a_bundle(tmp_path, checkpoint):
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(InputError, match="output folder exists"):
            write_bundle(checkpoint, out, RELEASE, replace=replace)
    assert (out / "notes.txt").read_text() == "mine"
    shutil.rmtree(out)
    write_bundle(checkpoint, out, RELEASE)
    with pytest.raises(InputError, match="--replace"):
        write_bundle(checkpoint, out, RELEASE)
    write_bundle(checkpoint, out, RELEASE, replace=True)


def test_the_manifest_says_what_the_checkpoint_is(tmp_path, checkpoint):
    (tmp_path / "line.yaml").write_text(LINE)
    release = Release(
        "nano",
        "0.1.0",
        7,
        line=tmp_path / "line.yaml",
        evaluation={"letter": {"accuracy": 0.97, "detail": {"curve": [0.5]}}},
        thresholds={"grid_row": 0.42},
    )
    done: list[int] = []
    manifest = write_bundle(
        checkpoint, tmp_path / "b", release, progress=lambda _what, steps: done.append(steps)
    )
    assert manifest == read_manifest(tmp_path / "b")
    assert sum(done) == bundle.steps_of(bundle.read_network(checkpoint))
    assert (manifest.line, manifest.release_counter) == ("demo-line", 7)
    assert manifest.images == {"sheet": (168, 336), "surface": (224, 672)}
    assert manifest.tokens["image_pad"] == 5
    assert manifest.model["none_weight"] == 0.25
    assert manifest.model["mrope_section"] == (8, 12, 12) or list(
        manifest.model["mrope_section"]
    ) == [8, 12, 12]
    assert manifest.thresholds == {"grid_row": 0.42}
    assert manifest.training["evaluation"]["letter"] == {"accuracy": 0.97}
    assert {"line.yaml", "MODEL_CARD.md"} <= set(manifest.files)
    card = (tmp_path / "b" / "MODEL_CARD.md").read_text()
    assert "| letter.accuracy | 0.97 |" in card
    assert "| grid_row | 0.42 |" in card


def test_int8_is_small_and_opens(tmp_path, checkpoint):
    small = write_bundle(checkpoint, tmp_path / "small", RELEASE)
    full = write_bundle(checkpoint, tmp_path / "full", Release("nano", "0.1.0", 3, "fp32"))
    sizes = [sum(entry.size for entry in m.files.values()) for m in (small, full)]
    assert sizes[0] < 0.4 * sizes[1]
    with VisionLanguageModel.open(tmp_path / "small") as model:
        assert np.isfinite(model.embed_images([np.zeros((28, 28, 3), np.uint8)])[0]).all()


def test_the_same_checkpoint_gives_the_same_bundle(tmp_path, checkpoint):
    first = write_bundle(checkpoint, tmp_path / "a", RELEASE)
    second = write_bundle(checkpoint, tmp_path / "b", RELEASE)
    assert first.sha256 == second.sha256


def test_the_model_card_invents_no_figures(tmp_path, checkpoint):
    manifest: Manifest = write_bundle(checkpoint, tmp_path / "b", RELEASE)
    card = model_card.render(manifest, {}, {})
    assert "No training card" in card
    assert "No evaluation figures" in card
    assert "accuracy" not in card


def test_the_command_prints_one_json_line_last(tmp_path, checkpoint, monkeypatch, capsys):
    arguments = ["bundle", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "b")]
    monkeypatch.setattr("sys.argv", arguments)
    assert bundle.main() == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["precision"] == "int8"
    assert last["sha256"] == read_manifest(tmp_path / "b").sha256
    assert bundle.main() == 1
    assert "output folder exists" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, ""])
def test_a_gate_without_cases_is_refused_before_anything_is_written(
    tmp_path, checkpoint, monkeypatch, capsys, content
):
    cases = tmp_path / "cases"
    cases.mkdir()
    if content is not None:
        (cases / "cases.jsonl").write_text(content)
    arguments = ["bundle", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "b")]
    monkeypatch.setattr("sys.argv", [*arguments, "--gate", str(cases)])
    assert bundle.main() == 1
    assert "no cases for the gate" in capsys.readouterr().err
    assert not list(tmp_path.glob("b*"))


def test_the_verify_command_passes_on_its_own_bundle(tmp_path, monkeypatch, capsys):
    from export import verify
    from training.nano import model as training_nano

    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    training_nano.save_checkpoint(
        training_nano.build_model(text_depth=1, vision_depth=1), folder, {}
    )
    write_bundle(folder, tmp_path / "b", Release("nano", "0.1.0", 1, "fp32"))
    arguments = ["verify", "--checkpoint", str(folder), "--bundle", str(tmp_path / "b")]
    monkeypatch.setattr("sys.argv", [*arguments, "--repeats", "1"])
    assert verify.main() == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["ok"]
    assert last["positions_agree"]
    assert last["max_diff"] < 1e-4
    assert set(last["timing"]) == {"sheet", "surface"}
