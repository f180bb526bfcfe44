"""Engines of TensorRT: keys, folders and locks. No device: the vendor's call is played here."""

from __future__ import annotations

import fcntl
import json
import subprocess
import types
from dataclasses import replace

import pytest

from forge_station.errors import BundleError, ModelError
from forge_station.vlm import engine_cache
from forge_station.vlm.bundle_files import read_manifest
from forge_station.vlm.engine_cache import EngineCache, Machine

ORIN = Machine("sm_87", "10.3.0", "540.4.0")


def vendor(_bundle, _manifest, graph, folder) -> None:
    (folder / f"{graph}.engine").write_bytes(b"plan")


def never(*_args) -> None:
    raise AssertionError("an engine is built that is there already")


@pytest.fixture
def cache(tmp_path) -> EngineCache:
    return EngineCache(tmp_path / "engines", ORIN)


def test_engines_are_built_once_and_show_progress(cache, bundle):
    digest = read_manifest(bundle).sha256
    shown: list[tuple[str, int, int]] = []
    assert not cache.ready(digest)
    folder = cache.build(bundle, vendor, lambda *step: shown.append(step))
    assert folder == cache.folder(digest) and cache.ready(digest)
    assert shown == [("vision.onnx", 0, 2), ("decoder.onnx", 1, 2), ("", 2, 2)]
    assert cache.build(bundle, never) == folder


@pytest.mark.parametrize(
    "other",
    [
        replace(ORIN, architecture="sm_90"),
        replace(ORIN, tensorrt="10.4.0"),
        replace(ORIN, driver="540.5.0"),
    ],
)
def test_no_engine_of_another_machine_is_used(cache, bundle, other):
    digest = read_manifest(bundle).sha256
    cache.build(bundle, vendor)
    elsewhere = EngineCache(cache.root, other)
    assert elsewhere.folder(digest) != cache.folder(digest)
    assert not elsewhere.ready(digest)
    # Not even where somebody renames the folder.
    cache.folder(digest).rename(elsewhere.folder(digest))
    assert not elsewhere.ready(digest)


def test_no_engine_of_another_bundle_is_used(cache, bundle):
    cache.build(bundle, vendor)
    assert not cache.ready("0" * 64)


@pytest.mark.parametrize("damage", ["engine cut", "engine gone", "note gone", "note broken"])
def test_a_damaged_folder_is_built_anew(cache, bundle, damage):
    folder = cache.build(bundle, vendor)
    digest = read_manifest(bundle).sha256
    engine, note = folder / "decoder.onnx.engine", folder / "engines.json"
    match damage:
        case "engine cut":
            engine.write_bytes(b"pl")
        case "engine gone":
            engine.unlink()
        case "note gone":
            note.unlink()
        case _:
            note.write_text("{")
    assert not cache.ready(digest)
    cache.build(bundle, vendor)
    assert cache.ready(digest)


def test_a_failed_build_leaves_nothing(cache, bundle):
    def dies(_bundle, _manifest, graph, folder):
        vendor(_bundle, _manifest, graph, folder)
        if graph == "decoder.onnx":
            raise ModelError("out of memory")

    with pytest.raises(ModelError, match="out of memory"):
        cache.build(bundle, dies)
    assert [path.name for path in cache.root.iterdir()] == ["builder.lock"]
    with pytest.raises(ModelError, match="wrote no engine"):
        cache.build(bundle, lambda *_: None)


def test_an_edited_bundle_gets_no_engine(cache, tmp_path):
    with pytest.raises(BundleError):
        cache.build(tmp_path, never)


def test_one_builder_at_a_time(cache, bundle):
    cache.root.mkdir(parents=True)
    with (cache.root / "builder.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process builds"):
            cache.build(bundle, never)
    cache.build(bundle, vendor)


def test_old_engines_are_removed_and_wanted_ones_stay(cache, bundle):
    digest = read_manifest(bundle).sha256
    cache.build(bundle, vendor)
    EngineCache(cache.root, replace(ORIN, driver="1")).build(bundle, vendor)
    (cache.root / "left.building").mkdir()
    removed = cache.prune([digest])
    assert removed == ["left.building", f"sm_87-trt10.3.0-driver1-{digest[:16]}"]
    assert cache.ready(digest)
    assert cache.prune([]) == [cache.folder(digest).name]


def answer(monkeypatch, text: str, libraries: dict[str, int]) -> None:
    def run(*_args, **_options):
        return subprocess.CompletedProcess((), 0, text)

    def load(name: str):
        if name not in libraries:
            raise OSError(name)
        return types.SimpleNamespace(getInferLibVersion=lambda: libraries[name])

    monkeypatch.setattr(engine_cache.subprocess, "run", run)
    monkeypatch.setattr(engine_cache.ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("number", "version"), [(8601, "8.6.1"), (100300, "10.3.0"), (110401, "11.4.1")]
)
def test_the_machine_says_what_it_is(monkeypatch, number, version):
    answer(monkeypatch, "8.7, 540.4.0\n9.0, 540.4.0\n", {"libnvinfer.so.10": number})
    assert engine_cache.this_machine() == Machine("sm_87", version, "540.4.0")


@pytest.mark.parametrize("text", ["", "no devices were found\n"])
def test_a_machine_without_a_gpu_says_so(monkeypatch, text):
    answer(monkeypatch, text, {})
    with pytest.raises(ModelError, match="GPU cannot be asked"):
        engine_cache.this_machine()


def test_a_machine_without_tensorrt_says_so(monkeypatch):
    answer(monkeypatch, "8.7, 540.4.0\n", {})
    with pytest.raises(ModelError, match="TensorRT is not installed"):
        engine_cache.this_machine()


def test_the_key_is_a_file_name():
    assert Machine("sm_87", "10/3", "a b").key == "sm_87-trt10_3-drivera_b"


def test_options_name_every_input_of_the_graphs(model, bundle, tmp_path):
    manifest = read_manifest(bundle)
    graphs = dict(zip(engine_cache.GRAPHS, (model._vision, model._decoder), strict=True))
    for graph, opened in graphs.items():
        given = engine_cache.options(manifest, graph, tmp_path)
        assert given["trt_engine_cache_path"] == str(tmp_path)
        for size in ("min", "opt", "max"):
            text = given[f"trt_profile_{size}_shapes"]
            shapes = {
                name: [int(n) for n in dims.split("x")]
                for name, _, dims in (item.partition(":") for item in text.split(","))
            }
            assert shapes.keys() == opened.inputs.keys()
            for name, dims in shapes.items():
                fixed = opened.inputs[name]
                assert len(dims) == len(fixed)
                assert all(n == m for n, m in zip(dims, fixed, strict=True) if isinstance(m, int))
    assert engine_cache.settings(manifest, None) == {graph: {} for graph in graphs}


def test_the_command_names_what_is_missing(monkeypatch, capsys, bundle, tmp_path):
    answer(monkeypatch, "8.7, 540.4.0\n", {"libnvinfer.so": 100300})
    arguments = ["engine_cache", "--bundle", str(bundle), "--cache", str(tmp_path / "c")]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(engine_cache, "build_engine", vendor)
    assert engine_cache.main() == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["engines"].startswith(str(tmp_path / "c" / ORIN.key[:5]))
    assert "1/2 engines" in said.err
