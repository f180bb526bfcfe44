"""Every reader of files, given damaged ones: it reads them or says what is wrong, in one error.

Good files of each kind are cut, overwritten, mixed and filled up at random places (hypothesis,
bounded). What comes out is data of the promised shape or a StationError that names the file; no
other exception, no warning, and no claim on memory that the file only pretends to need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_station.capture import calibration_io, foreign, replay
from forge_station.capture.calibration import Calibration
from forge_station.errors import StationError
from forge_station.geometry.cloud_io import read_cloud, read_mesh
from tests.capture.test_replay import head, recorded
from tests.geometry.test_cloud_io import POINTS, npz, pcd, ply, text

FUZZED = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
OBJ = b"# made by hand\nv 0 0 0\nv 10 0 0\nv 0 10 0\nv 0 0 10\nf 1 2 3\nf 1 2 4\nf 1/1/1 3//2 4\n"
ASCII_STL = b"solid a\n facet normal 0 0 1\n  outer loop\n   vertex 0 0 0\n   vertex 9 0 0\n"
ASCII_STL += b"   vertex 0 9 0\n  endloop\n endfacet\nendsolid a\n"
BINARY_STL = bytes(80) + np.uint32(2).tobytes()
BINARY_STL += 2 * (np.arange(12, dtype="<f4").tobytes() + b"\0\0")
FACES = b"ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\nproperty float y\n"
FACES += b"property float z\nelement face 1\nproperty list uchar int vertex_indices\nend_header\n"
FACES += b"0 0 0\n9 0 0\n0 9 1\n3 0 1 2\n"
XML = b"""<?xml version="1.0"?>
<opencv_storage>
<img_shape type_id="opencv-matrix"><rows>2</rows><cols>1</cols><dt>d</dt><data>24. 32.</data></img_shape>
<rms>0.5</rms>
<cam_int type_id="opencv-matrix"><rows>3</rows><cols>3</cols><dt>d</dt><data>50. 0. 15. 0. 50. 11. 0. 0. 1.</data></cam_int>
<cam_dist type_id="opencv-matrix"><rows>5</rows><cols>1</cols><dt>d</dt><data>0. 0. 0. 0. 0.</data></cam_dist>
<proj_int type_id="opencv-matrix"><rows>3</rows><cols>3</cols><dt>d</dt><data>50. 0. 15. 0. 50. 11. 0. 0. 1.</data></proj_int>
<proj_dist type_id="opencv-matrix"><rows>5</rows><cols>1</cols><dt>d</dt><data>0. 0. 0. 0. 0.</data></proj_dist>
<rotation type_id="opencv-matrix"><rows>3</rows><cols>3</cols><dt>d</dt><data>1. 0. 0. 0. 1. 0. 0. 0. 1.</data></rotation>
<translation type_id="opencv-matrix"><rows>3</rows><cols>1</cols><dt>d</dt><data>9. 0. 0.</data></translation>
</opencv_storage>
"""  # noqa: E501
WORDS = (
    *(b"nan", b"-1", b"0", b"99999999999999999999", b"1e999", b"\xff\xfe", b"", b"\n", b"list"),
    *(b"*x", b"&x", b"!!python/object", b"[" * 50, b"4294967295", b"binary", b"ascii"),
)


def _cloud(path: Path) -> object:
    found = read_cloud(path).points
    assert found.ndim == 2 and found.shape[1] == 3 and np.isfinite(found).all()
    return found


def _mesh(path: Path) -> object:
    mesh = read_mesh(path)
    assert np.isfinite(mesh.vertices).all()
    assert mesh.faces.size == 0 or 0 <= mesh.faces.min() <= mesh.faces.max() < len(mesh.vertices)
    return mesh


def _opencv(path: Path) -> Calibration:
    return calibration_io.import_opencv(path, code_step=1, pattern_size=(32, 24))


@lru_cache(maxsize=1)
def _yaml() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.yaml"
        calibration_io.save(head(), path)
        return path.read_bytes()


GOOD: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], object]]] = {
    "ply ascii": ("a.ply", lambda: ply(POINTS, "ascii"), _cloud),
    "ply binary": ("a.ply", lambda: ply(POINTS, "binary_little_endian"), _cloud),
    "pcd ascii": ("a.pcd", lambda: pcd(POINTS, "ascii"), _cloud),
    "pcd binary": ("a.pcd", lambda: pcd(POINTS, "binary"), _cloud),
    "pcd packed": ("a.pcd", lambda: pcd(POINTS, "binary_compressed"), _cloud),
    "npz": ("a.npz", lambda: npz(points=POINTS), _cloud),
    "xyz": ("a.xyz", text, _cloud),
    "ply mesh": ("a.ply", lambda: FACES, _mesh),
    "obj": ("a.obj", lambda: OBJ, _mesh),
    "stl ascii": ("a.stl", lambda: ASCII_STL, _mesh),
    "stl binary": ("a.stl", lambda: BINARY_STL, _mesh),
    "calibration yaml": ("head.yaml", _yaml, calibration_io.load),
    "opencv xml": ("head.xml", lambda: XML, _opencv),
}


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """One to three damages: cut off, overwritten, doubled or taken out, or words put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.integers(1, 40))
        match draw(st.sampled_from(["cut", "write", "double", "drop", "word"])):
            case "cut":
                del data[at:]
            case "write":
                data[at : at + size] = draw(st.binary(min_size=1, max_size=size))
            case "double":
                data[at:at] = data[at : at + size]
            case "drop":
                del data[at : at + size]
            case _:
                data[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(WORDS))
    return bytes(data)


def attempt(read: Callable[[Path], object], path: Path, named: Path) -> None:
    """Read, or fail with one error that names the file."""
    said = named.name
    try:
        read(path)
    except StationError as error:
        said = str(error)
    assert named.name in said
    assert len(said) < 4000


@pytest.mark.parametrize("kind", GOOD)
@FUZZED
@given(data=st.data())
def test_damaged_files_are_read_or_named(kind: str, data: Any, tmp_path: Path) -> None:
    name, make, read = GOOD[kind]
    path = tmp_path / name
    path.write_bytes(data.draw(damaged(make())))
    attempt(read, path, path)


@pytest.mark.parametrize("kind", GOOD)
def test_good_files_are_read_and_empty_or_foreign_ones_named(kind: str, tmp_path: Path) -> None:
    name, make, read = GOOD[kind]
    path = tmp_path / name
    path.write_bytes(make())
    read(path)
    for _, other, _ in GOOD.values():
        path.write_bytes(other())
        attempt(read, path, path)
    for content in (b"", b"\0" * 100, b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"<html></html>"):
        path.write_bytes(content)
        with pytest.raises(StationError, match=name):
            read(path)
    path.unlink()
    with pytest.raises(StationError, match=name):
        read(path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("scan"))


@FUZZED
@given(data=st.data())
def test_damaged_recordings_are_read_or_named(data: Any, recording: Path) -> None:
    """Manifest, calibration or one of the images."""
    files = sorted(path for path in recording.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    good = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(good)))
        with contextlib.suppress(StationError):
            replay.read(recording)
    finally:
        path.write_bytes(good)
    replay.read(recording)


@FUZZED
@given(data=st.data())
def test_damaged_image_stacks_of_other_tools_are_read_or_named(data: Any, tmp_path: Path) -> None:
    spec = replace(
        head().pattern, kind="gray_pairs", axis="column", period_px=0.0, steps=0, column_bits=2
    )
    rng = np.random.default_rng(0)
    for k in range(6):
        ok, png = cv2.imencode(".png", rng.integers(0, 256, (24, 32), dtype=np.uint8))
        assert ok
        content = png.tobytes()
        if data.draw(st.booleans()):
            content = data.draw(damaged(content))
        (tmp_path / f"{k}.png").write_bytes(content)
    with contextlib.suppress(StationError):
        foreign.read_folder(tmp_path, replace(head(), pattern=spec))
