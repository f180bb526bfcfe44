"""A bundle that is not exactly as released is refused before anything is loaded."""

from __future__ import annotations

import json
import shutil

import pytest

from forge_station.contract.manifest import MANIFEST_NAME
from forge_station.errors import BundleError
from forge_station.vlm.bundle_files import verify_folder
from forge_station.vlm.model import VisionLanguageModel


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "copy")


def files_of(bundle) -> list[str]:
    return sorted(path.name for path in bundle.iterdir() if path.name != MANIFEST_NAME)


def test_an_intact_folder_passes(bundle):
    assert sorted(verify_folder(bundle).manifest.files) == files_of(bundle)


def test_every_file_is_guarded_against_truncation_edits_and_loss(bundle, tmp_path):
    for name in files_of(bundle):
        for fault, pattern in (
            (lambda b: b[:-1], "wrong size"),
            (lambda b: b"", "wrong size"),
            (lambda b: bytes([b[0] ^ 1]) + b[1:], "was changed"),
            (None, "cannot be read"),
        ):
            folder = shutil.copytree(bundle, tmp_path / "x")
            path = folder / name
            if fault is None:
                path.unlink()
            else:
                path.write_bytes(fault(path.read_bytes()))
            with pytest.raises(BundleError, match=pattern) as error:
                VisionLanguageModel.open(folder)
            assert name in str(error.value)
            assert "copy it again" in str(error.value)
            shutil.rmtree(folder)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"name": "x"}', b"\xff"])
def test_a_bad_manifest_is_named(copy, content):
    path = copy / MANIFEST_NAME
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        VisionLanguageModel.open(copy)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(BundleError, match=r"no readable manifest.*nowhere"):
        VisionLanguageModel.open(tmp_path / "nowhere")


def edit(copy, change) -> None:
    path = copy / MANIFEST_NAME
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["decoder.onnx", "vision.onnx", "tokenizer.json", "embed.npy"])
def test_a_manifest_that_does_not_list_a_needed_file_is_refused(copy, name):
    edit(copy, lambda data: data["files"].pop(name))
    with pytest.raises(BundleError, match=f"no such file.*{name}"):
        VisionLanguageModel.open(copy)


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("layers", 3, "decoder graph does not fit"),
        ("layers", None, r"model\.layers"),
        ("hidden_size", 200, "embedding table does not fit"),
        ("patch", "14", r"model\.patch"),
    ],
)
def test_a_manifest_of_another_model_is_refused(copy, key, value, pattern):
    edit(copy, lambda data: data["model"].update({key: value}))
    with pytest.raises(BundleError, match=pattern):
        VisionLanguageModel.open(copy)


def test_a_bundle_of_another_contract_is_refused(copy):
    edit(copy, lambda data: data.update(contract_version="999.0"))
    with pytest.raises(BundleError, match=r"contract_version.*999\.0"):
        VisionLanguageModel.open(copy)
