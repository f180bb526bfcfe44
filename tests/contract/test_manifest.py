"""The bundle manifest: what it accepts, and every way a bundle can be altered."""

from __future__ import annotations

import hashlib
import json

import pytest

from forge_station.contract import CONTRACT_VERSION
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import (
    FileEntry,
    Manifest,
    parse,
    verify,
    verify_all,
    verify_digest,
)

CONTENTS = {"vision.onnx": b"graph one", "decoder.onnx": b"graph two", "card/README.md": b"figures"}


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "name": "nano",
        "version": "1.0.0",
        "release_counter": 7,
        "contract_version": CONTRACT_VERSION,
        "precision": "int8",
        "files": {name: FileEntry.of(content) for name, content in CONTENTS.items()},
        "images": {"sheet": (168, 336), "surface": (224, 672)},
        "tokens": {"vocab_size": 512, "image_pad": 6},
        "model": {"patch": 14, "layers": 4},
        "thresholds": {"surface": 0.4},
        "training": {"steps": 9000, "reading": {"accuracy": 0.97}},
    }
    fields.update(changes)
    return Manifest(**fields)


def test_comes_back_from_its_bytes():
    assert parse(manifest().to_json()) == manifest()


def test_the_digest_changes_with_any_file_and_not_with_key_order():
    first = manifest()
    shuffled = json.dumps(dict(reversed(json.loads(first.to_json()).items()))).encode()
    assert parse(shuffled).sha256 == first.sha256
    other = {**first.files, "vision.onnx": FileEntry.of(b"graph 1")}
    assert manifest(files=other).sha256 != first.sha256


def test_intact_files_verify():
    for name, content in CONTENTS.items():
        verify(manifest(), name, content)
        verify_digest(manifest(), name, len(content), hashlib.sha256(content).hexdigest())
    verify_all(manifest(), CONTENTS)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({**CONTENTS, "vision.onnx": b"graph onf"}, "vision.onnx: bundle file was changed"),
        ({**CONTENTS, "vision.onnx": b"graph on"}, "vision.onnx: bundle file has the wrong size"),
        ({**CONTENTS, "vision.onnx": b""}, "got 0 bytes|, 0 bytes"),
        (
            {**CONTENTS, "vision.onnx": b"graph two", "decoder.onnx": b"graph one"},
            "2 problem",
        ),
        ({k: v for k, v in CONTENTS.items() if k != "decoder.onnx"}, "decoder.onnx: missing"),
        ({**CONTENTS, "extra.pkl": b"x"}, "extra.pkl: file is not part of the bundle"),
    ],
)
def test_an_altered_bundle_is_refused(contents, message):
    with pytest.raises(ContractError, match=message):
        verify_all(manifest(), contents)


def test_a_changed_file_is_named_with_what_to_do():
    with pytest.raises(ContractError, match=r"nano: vision.onnx.*copy it again"):
        verify(manifest(), "vision.onnx", b"graph onf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "a table with the keys"),
        (b"null", "a table with the keys"),
        (manifest().to_json()[:-60], "truncated or edited"),
        (b'{"name": "a", "name": "b"}', "key given twice: name"),
        (b'{"name": NaN}', "name: nan"),
        (b'{"model": ' + b"[" * 100_000, "not JSON"),
        (b'{"release_counter": ' + b"9" * 5000 + b"}", "manifest"),
    ],
)
def test_a_damaged_manifest_is_refused(content, message):
    with pytest.raises(ContractError, match=message):
        parse(content, "bundle/manifest.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "Nano 1", "a lower-case name"),
        ("name", "../nano", "a lower-case name"),
        ("version", "one", "a version like 1.0.0"),
        ("release_counter", -1, "at least 0"),
        ("release_counter", "7", "a whole number"),
        ("contract_version", CONTRACT_VERSION + 1, "export the bundle again"),
        ("contract_version", 0, "export the bundle again"),
        ("files", {}, "1 to 200 files"),
        ("files", {f"f{n}": {"sha256": "0" * 64, "size": 1} for n in range(201)}, "1 to 200 files"),
        ("files", {"../etc/passwd": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {"/etc/passwd": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {"a/../b": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {"a\\b": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {".hidden": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {"manifest.json": {"sha256": "0" * 64, "size": 1}}, "inside the bundle"),
        ("files", {"a.onnx": {"sha256": "0" * 63, "size": 1}}, "64 lower-case hex digits"),
        ("files", {"a.onnx": {"sha256": "A" * 64, "size": 1}}, "64 lower-case hex digits"),
        ("files", {"a.onnx": {"sha256": "0" * 64, "size": -1}}, "at least 0"),
        ("files", {"a.onnx": "0" * 64}, "a table with the keys sha256, size"),
        ("images", {"sheet": [168]}, "2 items"),
        ("thresholds", {"surface": float("inf")}, "a finite number"),
        ("colour", "red", "unknown key"),
    ],
)
def test_an_edited_manifest_is_refused_with_its_field(key, value, message):
    data = json.loads(manifest().to_json())
    data[key] = value
    with pytest.raises(ContractError) as caught:
        parse(json.dumps(data).encode())
    assert message in str(caught.value)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize("key", ["name", "version", "release_counter", "contract_version", "files"])
def test_a_missing_field_is_named(key):
    data = json.loads(manifest().to_json())
    del data[key]
    with pytest.raises(ContractError, match=f"{key}: missing"):
        parse(json.dumps(data).encode())
