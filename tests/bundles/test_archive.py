"""One file for a bundle: the same bundle comes out, or nothing at all."""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_station.bundles import archive
from forge_station.bundles.trust import Trust
from forge_station.contract.manifest import MANIFEST_NAME
from forge_station.contract.seal import SEAL_NAME
from forge_station.errors import BundleError
from forge_station.vlm import bundle_files
from forge_station.vlm.bundle_files import verify_folder
from tests.bundles import rig
from tests.bundles.rig import Signer

NO_WEIGHTS = b"\x3a\x00"
"""An ONNX model in protobuf: one graph, empty."""
Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def signer() -> Signer:
    return Signer.new()


@pytest.fixture
def packed(tmp_path: Path, signer: Signer) -> Path:
    rig.write(tmp_path / "bundle", signer)
    archive.pack(tmp_path / "bundle", tmp_path / "b.fsb")
    return tmp_path / "b.fsb"


def test_comes_out_as_it_went_in(packed: Path, signer: Signer, tmp_path: Path) -> None:
    found = archive.take(packed, tmp_path / "out", signer.trust)
    assert len(found.signed_by) == 1
    for path in (tmp_path / "bundle").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    again = tmp_path / "again.fsb"
    archive.pack(tmp_path / "out", again)
    assert again.read_bytes() == packed.read_bytes(), "the same bundle is the same file"


def test_a_folder_is_taken_without_what_it_does_not_list(tmp_path: Path, signer: Signer) -> None:
    rig.write(tmp_path / "bundle", signer)
    (tmp_path / "bundle" / "stray.so").write_bytes(b"\x7fELF")
    archive.take(tmp_path / "bundle", tmp_path / "out", signer.trust)
    assert not (tmp_path / "out" / "stray.so").exists()


def member(name: str, content: bytes = b"x", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(header, key, value)
    return header, content


def named(members: Members, name: str) -> int:
    return next(k for k, (header, _) in enumerate(members) if header.name == name)


def swapped(members: Members) -> Members:
    """The content of one file under the name of another of the same size."""
    a = named(members, "embed.npy")
    content = bytearray(members[a][1])
    content[-1] ^= 1
    return [*members[:a], (members[a][0], bytes(content)), *members[a + 1 :]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "was changed"),
        (lambda m: [*m, member("../../outside.json")], "does not belong"),
        (lambda m: [*m, member("/tmp/outside.json")], "does not belong"),
        (lambda m: [*m, member("extra.json")], "does not belong"),
        (lambda m: [*m, m[-1]], "does not belong"),
        (lambda m: [*m, member("l", type=tarfile.SYMTYPE, linkname="/etc")], "does not belong"),
        (lambda m: [*m, member("l", type=tarfile.LNKTYPE, linkname="x")], "does not belong"),
        (lambda m: [*m, member("d", type=tarfile.CHRTYPE)], "does not belong"),
        (lambda m: [*m, member("p", type=tarfile.FIFOTYPE)], "does not belong"),
        (lambda m: [*m, member("dir", type=tarfile.DIRTYPE)], "does not belong"),
        (lambda m: [(h, c + b"!") if h.name == "notes.json" else (h, c) for h, c in m], "belong"),
        (lambda m: m[:-1], "incomplete"),
        (lambda m: m[1:], "not a bundle file"),
        (lambda m: [], "not a bundle file"),
        (lambda m: [(h, c) for h, c in m if h.name != SEAL_NAME], "not signed"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused_and_leaves_nothing(
    packed: Path, signer: Signer, tmp_path: Path, change: Callable[[Members], Members], said: str
) -> None:
    bad = rig.repacked(packed, tmp_path / "bad.fsb", change)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BundleError, match=said):
        archive.take(bad, tmp_path / "out", signer.trust)
    assert sorted(tmp_path.iterdir()) == before
    assert not Path("/tmp/outside.json").exists()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.8])
def test_a_half_transfer_is_refused(
    packed: Path, signer: Signer, tmp_path: Path, share: float
) -> None:
    content = packed.read_bytes()
    end = max(p for p in range(0, len(content), 512) if content[p : p + 512].strip(b"\0"))
    bad = tmp_path / "half.fsb"
    bad.write_bytes(content[: int(end * share)])
    with pytest.raises(BundleError, match=r"(?i)copy it again|not a bundle file"):
        archive.take(bad, tmp_path / "out", signer.trust)
    assert not (tmp_path / "out").exists()


def test_no_more_is_written_than_there_is_room_for(
    packed: Path, signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 10)
    with pytest.raises(BundleError, match="no room"):
        archive.take(packed, tmp_path / "out", signer.trust)
    assert not (tmp_path / "out").exists()


def test_signatures_are_counted_by_key(tmp_path: Path) -> None:
    one, two, other = Signer.new(), Signer.new(), Signer.new()
    keys = (*one.trust.keys, *two.trust.keys)
    both = Trust(keys, threshold=2)
    rig.write(tmp_path / "one", one, other)
    rig.write(tmp_path / "two", one, two)
    with pytest.raises(BundleError, match="2 signatures of the trusted keys"):
        verify_folder(tmp_path / "one", both)
    assert len(verify_folder(tmp_path / "two", both).signed_by) == 2
    with pytest.raises(BundleError, match="not signed by a key"):
        verify_folder(tmp_path / "two", other.trust)


def test_an_altered_manifest_is_refused_even_where_unsigned_bundles_are_taken(
    tmp_path: Path, signer: Signer
) -> None:
    folder = tmp_path / "bundle"
    rig.write(folder, signer)
    path = folder / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"release_counter": 1', b'"release_counter": 9'))
    for unsigned in (False, True):
        with pytest.raises(BundleError, match="altered after it was signed"):
            verify_folder(folder, Trust(signer.trust.keys, unsigned=unsigned))
    (folder / SEAL_NAME).unlink()
    with pytest.raises(BundleError, match="not signed"):
        verify_folder(folder, signer.trust)
    assert verify_folder(folder, Trust(signer.trust.keys, unsigned=True)).signed_by == ()


@pytest.mark.parametrize("seal", [b"", b"{", b"[]", b'{"signatures": []}', b"\xff"])
def test_a_damaged_seal_is_one_clear_error(tmp_path: Path, signer: Signer, seal: bytes) -> None:
    rig.write(tmp_path / "bundle", signer)
    (tmp_path / "bundle" / SEAL_NAME).write_bytes(seal)
    with pytest.raises(BundleError, match="seal"):
        verify_folder(tmp_path / "bundle", signer.trust)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_last_byte_of_a_file_counts_wherever_a_read_ends(
    tmp_path: Path, signer: Signer, more: int
) -> None:
    content = b"w" * (2 * bundle_files._CHUNK + more)
    files = {"vision.onnx.data": content, "vision.onnx": NO_WEIGHTS}
    rig.write(tmp_path / "bundle", signer, files=files)
    verify_folder(tmp_path / "bundle", signer.trust)
    (tmp_path / "bundle/vision.onnx.data").write_bytes(content[:-1] + b"x")
    with pytest.raises(BundleError, match="was changed"):
        verify_folder(tmp_path / "bundle", signer.trust)


def test_links_in_a_folder_are_refused(tmp_path: Path, signer: Signer) -> None:
    rig.write(tmp_path / "bundle", signer)
    path = tmp_path / "bundle" / "embed.npy"
    shutil.copy(path, tmp_path / "elsewhere.npy")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(BundleError, match="link or a device"):
        verify_folder(tmp_path / "bundle", signer.trust)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="link or a device"):
        verify_folder(tmp_path / "bundle", signer.trust)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/forge-station-was-here",))


def npz(**arrays: np.ndarray[Any, Any]) -> bytes:
    import io

    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


OBJECTS = np.array([Evil()], dtype=object)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.pkl", pickle.dumps({})),
        ("model.pt", b"PK"),
        ("lib.so", b"\x7fELF"),
        ("embed.npy", rig.array_bytes(OBJECTS, pickled=True)),
        ("embed.npy", pickle.dumps({})),
        ("references.npz", npz(a=OBJECTS)),
        ("references.npz", b"PK\x05\x06" + b"\0" * 10),
        ("notes.json", b"{}\0"),
        ("notes.yaml", b"\xff\xfe"),
        ("vision.onnx", pickle.dumps({"a": 1})),
        ("vision.onnx", b""),
        ("vision.onnx", b"\x3a\xff\xff\xff\xff\x7f"),
        ("other.onnx.data", b"weights of nothing"),
        ("w.safetensors", b"\xff" * 16),
        ("w.safetensors", b"\x02\0\0\0\0\0\0\0[]"),
    ],
)
def test_a_signed_file_that_could_run_code_is_refused(
    tmp_path: Path, signer: Signer, name: str, content: bytes
) -> None:
    rig.write(tmp_path / "bundle", signer, files={name: content})
    with pytest.raises(BundleError, match="does not open"):
        verify_folder(tmp_path / "bundle", signer.trust)
    assert not Path("/tmp/forge-station-was-here").exists()


def test_a_model_may_take_weights_from_listed_files_and_operators_of_the_runtime_only(
    tmp_path: Path, signer: Signer
) -> None:
    onnx = pytest.importorskip("onnx")

    def model(location: str, domain: str = "", *, nested: bool = False) -> bytes:
        tensor = onnx.TensorProto(data_type=1, dims=[1], name="w")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        node = onnx.helper.make_node("Add", ["w", "w"], ["y"], domain=domain)
        graph = onnx.helper.make_graph([node], "g", [], [], [] if nested else [tensor])
        if nested:
            graph.node.append(onnx.helper.make_node("Constant", [], ["w"], value=tensor))
            loop = onnx.helper.make_node("Loop", [], [], body=graph)
            graph = onnx.helper.make_graph([loop], "outer", [], [])
        opsets = [onnx.helper.make_opsetid(domain, 1), onnx.helper.make_opsetid("", 17)]
        found: bytes = onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString()
        return found

    def written(name: str, content: bytes) -> Path:
        files = {"vision.onnx": content, "vision.onnx.data": b"1234"}
        rig.write(tmp_path / name, signer, files=files)
        return tmp_path / name

    for number, nested in enumerate((False, True)):
        good = written(f"good{number}", model("vision.onnx.data", "com.microsoft", nested=nested))
        verify_folder(good, signer.trust)
        for k, location in enumerate(("/etc/passwd", "../secret", "", "unlisted.onnx.data")):
            bad = written(f"bad{number}{k}", model(location, nested=nested))
            with pytest.raises(BundleError, match="does not list"):
                verify_folder(bad, signer.trust)
    with pytest.raises(BundleError, match=r"operators of evil\.ops"):
        verify_folder(written("ops", model("vision.onnx.data", "evil.ops")), signer.trust)
