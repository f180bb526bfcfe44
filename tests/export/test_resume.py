"""An export that is killed goes on where it stopped, and ends with the same bytes."""

from __future__ import annotations

import json
import shutil

import pytest

from export import bundle
from export.bundle import Release, partial_of, write_bundle
from export.decoder import write_decoder
from export.graph import GraphWriter
from export.network import read_network
from export.quantize import Nearest, Storage, dequantize
from export.tensors import Checkpoint

RELEASE = Release("nano", "0.1.0", precision="w4a16", created="2026-11-30T00:00:00Z")


class Killed(BaseException):
    """As KeyboardInterrupt: no error that anybody handles."""


class Dying(Nearest):
    """Dies at its `last` weight; counts what it was asked and what it was told."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.__dict__.update(asked=[], told=[], last=last)

    def __call__(self, name, weight, bias, bits, block):
        if len(self.asked) == self.last:
            raise Killed
        self.asked.append(name)
        return super().__call__(name, weight, bias, bits, block)

    def kept(self, name, stored, bias):
        self.told.append((name, stored))


@pytest.mark.parametrize("storage", [Storage(4), Storage(8), Storage(8, unpacked=True)], ids=str)
def test_a_graph_goes_on_at_the_tensor_where_it_stopped(nano, tmp_path, storage):
    checkpoint, network = Checkpoint(nano), read_network(nano).text
    whole = Dying()
    write_decoder(checkpoint, network, tmp_path / "a.onnx", storage, quantizer=whole)
    path = tmp_path / "b" / "a.onnx"
    path.parent.mkdir()
    with pytest.raises(Killed):
        write_decoder(checkpoint, network, path, storage, quantizer=Dying(9))
    assert not path.exists()
    again = Dying()
    write_decoder(checkpoint, network, path, storage, quantizer=again)
    assert [name for name, _ in again.told] == whole.asked[:9]
    assert again.asked == whole.asked[9:]
    for name in ("a.onnx", "a.onnx.data"):
        assert (path.parent / name).read_bytes() == (tmp_path / name).read_bytes()
    assert not list(path.parent.glob("*.journal"))
    name, stored = again.told[0]
    weight = checkpoint.read("model.language_model.layers.0.self_attn.q_proj.weight")
    fresh = Nearest()(name, weight * 64**-0.5, None, storage.bits, 32)
    assert (dequantize(stored) == dequantize(fresh)).all()


def test_half_a_tensor_at_the_end_is_written_again(nano, tmp_path):
    checkpoint, network = Checkpoint(nano), read_network(nano).text
    write_decoder(checkpoint, network, tmp_path / "whole.onnx", Storage(4))
    path = tmp_path / "d.onnx"
    with pytest.raises(Killed):
        write_decoder(checkpoint, network, path, Storage(4), quantizer=Dying(9))
    data, journal = tmp_path / "d.onnx.data", tmp_path / "d.onnx.journal"
    data.write_bytes(data.read_bytes()[:-100])
    journal.write_text(journal.read_text() + '{"name": "half')
    write_decoder(checkpoint, network, path, Storage(4))
    assert data.read_bytes() == (tmp_path / "whole.onnx.data").read_bytes()


def test_a_finished_graph_has_nothing_to_resume(tmp_path):
    with GraphWriter(tmp_path / "x.onnx", Storage(0)) as writer:
        writer.op("Identity", ["a"], ["b"])
        writer.save("x", [], [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]


def die_at(monkeypatch, name: str) -> None:
    def killed(*_args, **_options):
        raise Killed

    monkeypatch.setattr(bundle, name, killed)


@pytest.mark.parametrize("stage", ["write_decoder", "write_embed", "_finish"])
def test_a_killed_export_ends_with_the_same_bundle(nano, tmp_path, monkeypatch, stage):
    whole = write_bundle(nano, tmp_path / "whole", RELEASE)
    out = tmp_path / "b"
    with monkeypatch.context() as patch:
        die_at(patch, stage)
        with pytest.raises(Killed):
            write_bundle(nano, out, RELEASE)
    assert not out.exists()
    begun = (partial_of(out) / "vision.onnx.data").stat().st_mtime_ns
    done: list[int] = []
    manifest = write_bundle(nano, out, RELEASE, progress=lambda _what, steps: done.append(steps))
    assert manifest.sha256 == whole.sha256
    assert (out / "vision.onnx.data").stat().st_mtime_ns == begun, "not written again"
    assert sum(done) == bundle.steps_of(read_network(nano))
    assert not partial_of(out).exists()
    assert "job.json" not in manifest.files and not (out / "job.json").exists()


def test_another_job_starts_anew(nano, tmp_path, monkeypatch):
    checkpoint = shutil.copytree(nano, tmp_path / "checkpoint")
    out = tmp_path / "b"
    with monkeypatch.context() as patch:
        die_at(patch, "write_decoder")
        with pytest.raises(Killed):
            write_bundle(checkpoint, out, RELEASE)
    job = json.loads((partial_of(out) / "job.json").read_text())
    assert job["precision"] == "w4a16"
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # another time: perhaps another training step
    begun = (partial_of(out) / "vision.onnx.data").stat().st_mtime_ns
    write_bundle(checkpoint, out, RELEASE)
    assert (out / "vision.onnx.data").stat().st_mtime_ns != begun
