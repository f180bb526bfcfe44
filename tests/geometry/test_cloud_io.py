"""Cloud and mesh files: dialects by hand-made bytes, units, invalid points, every damage named."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture.base import Cloud
from forge_station.errors import InputError, ScanError, StationError
from forge_station.geometry.cloud_io import read_cloud, read_mesh, write_cloud

RNG = np.random.default_rng(0)
POINTS = (RNG.uniform(-40, 40, (60, 3))).astype(np.float32)
GREY = RNG.integers(0, 256, 60, dtype=np.uint8)


def ply(points: NDArray[Any], form: str, name: str = "float") -> bytes:
    head = f"ply\nformat {form} 1.0\ncomment made by hand\nelement vertex {len(points)}\n"
    head += "".join(f"property {name} {axis}\n" for axis in "xyz")
    head += "property uchar intensity\nend_header\n"
    if form == "ascii":
        rows = [f"{p[0]} {p[1]} {p[2]} {g}" for p, g in zip(points, GREY, strict=True)]
        return head.encode() + "\n".join(rows).encode() + b"\n"
    order = "<" if "little" in form else ">"
    kind = {"float": "f4", "double": "f8"}[name]
    record = np.empty(len(points), [*((a, order + kind) for a in "xyz"), ("i", "u1")])
    for k, axis in enumerate("xyz"):
        record[axis] = points[:, k]
    record["i"] = GREY
    return head.encode() + record.tobytes()


def lzf(data: bytes) -> bytes:
    """Literals of up to 16 bytes, back references wherever 8 bytes repeat at a distance of 4."""
    out, i = bytearray(), 0
    while i < len(data):
        n = 0
        while i >= 4 and i + n < len(data) and data[i + n] == data[i + n - 4] and n < 264:
            n += 1
        if n >= 8:
            out += bytes([(7 << 5) | 0, n - 9, 3]) if n >= 9 else bytes([((n - 2) << 5) | 0, 3])
            i += n
            continue
        chunk = data[i : i + 16]
        out += bytes([len(chunk) - 1]) + chunk
        i += len(chunk)
    return bytes(out)


def pcd(points: NDArray[Any], kind: str, width: int = 60, height: int = 1) -> bytes:
    head = (
        "# .PCD v0.7\nVERSION 0.7\nFIELDS x y z intensity\nSIZE 4 4 4 4\nTYPE F F F F\n"
        f"COUNT 1 1 1 1\nWIDTH {width}\nHEIGHT {height}\nVIEWPOINT 0 0 0 1 0 0 0\n"
        f"POINTS {width * height}\nDATA {kind}\n"
    ).encode()
    table = np.column_stack([points, GREY]).astype("<f4")
    if kind == "ascii":
        return head + "\n".join(" ".join(map(str, row)) for row in table.tolist()).encode()
    if kind == "binary":
        return head + table.tobytes()
    plain = table.T.tobytes()
    packed = lzf(plain)
    return head + struct.pack("<II", len(packed), len(plain)) + packed


def npz(**content: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **content)
    return buffer.getvalue()


def text(separator: str = " ", head: str = "") -> bytes:
    rows = [
        separator.join(map(str, (*p.tolist(), int(g)))) for p, g in zip(POINTS, GREY, strict=True)
    ]
    return (head + "\n".join(rows)).encode()


GOOD = [
    ("a.ply", ply(POINTS, "ascii")),
    ("a.ply", ply(POINTS, "binary_little_endian")),
    ("a.ply", ply(POINTS, "binary_big_endian")),
    ("A.PLY", ply(POINTS, "binary_little_endian", "double")),
    ("a.pcd", pcd(POINTS, "ascii")),
    ("a.pcd", pcd(POINTS, "binary")),
    ("a.pcd", pcd(POINTS, "binary_compressed")),
    ("a.npz", npz(points=POINTS, intensity=GREY)),
    ("a.npz", npz(xyz=POINTS.astype(np.float64), intensity=GREY)),
    ("a.xyz", text()),
    ("a.csv", text(",", "x,y,z,intensity\n")),
    ("a.txt", text(";", "# comment\n")),
]


@pytest.mark.parametrize(("name", "data"), GOOD)
def test_every_dialect_gives_the_same_cloud(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    cloud = read_cloud(tmp_path / name)
    np.testing.assert_allclose(cloud.points, POINTS, rtol=1e-6)
    assert cloud.points.dtype == np.float32
    assert cloud.intensity is not None
    assert np.array_equal(cloud.intensity, GREY)
    assert cloud.frame == "unknown"
    assert any("taken as mm" in note for note in cloud.notes)


@pytest.mark.parametrize("suffix", ["npz", "ply"])
def test_written_cloud_is_read_back(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"cloud.{suffix}"
    write_cloud(path, Cloud(POINTS * 0.01, GREY, 0.123, poses=4, frame="tray"))
    cloud = read_cloud(path, unit="auto" if suffix == "npz" else "mm")
    assert np.array_equal(cloud.points, POINTS * np.float32(0.01))
    assert cloud.intensity is not None
    assert np.array_equal(cloud.intensity, GREY)
    if suffix == "npz":
        assert (cloud.camera_pixel_mm, cloud.poses, cloud.frame) == (0.123, 4, "tray")
        assert cloud.notes == ("unit mm as given",)
    with pytest.raises(InputError, match=r"\.npz or \.ply"):
        write_cloud(tmp_path / "cloud.obj", cloud)


@pytest.mark.parametrize(
    ("unit", "factor"), [("auto", 1000), ("m", 1000), ("mm", 1), ("inch", 25.4)]
)
def test_cloud_in_metres_is_recognised_or_told(unit: str, factor: float, tmp_path: Path) -> None:
    path = tmp_path / "a.ply"
    path.write_bytes(ply(POINTS / 1000 + np.float32(0.4), "binary_little_endian"))
    cloud = read_cloud(path, unit=unit)
    np.testing.assert_allclose(cloud.points, (POINTS / 1000 + 0.4) * factor, rtol=1e-5)
    assert ("taken as metre" in cloud.notes[0]) == (unit == "auto")
    with pytest.raises(InputError, match="unit unknown"):
        read_cloud(path, unit="furlong")


def test_invalid_points_are_left_out_and_the_grid_kept(tmp_path: Path) -> None:
    points = POINTS.copy()
    points[3] = np.nan
    points[5, 1] = np.inf
    points[6] = 3e38
    points[7:12] = 0
    path = tmp_path / "a.pcd"
    path.write_bytes(pcd(points, "binary", width=10, height=6))
    cloud = read_cloud(path)
    assert len(cloud.points) == 52
    assert cloud.organised is not None
    assert cloud.organised.shape == (6, 10, 3)
    assert np.isnan(cloud.organised[0, [3, 5, 6, 7, 8, 9]]).all()
    np.testing.assert_allclose(cloud.organised[5, 9], POINTS[59], rtol=1e-6)
    assert cloud.intensity is not None
    assert len(cloud.intensity) == 52
    assert cloud.quality.valid_share == pytest.approx(52 / 60)
    assert any("5 points at (0, 0, 0)" in note for note in cloud.notes)
    path = tmp_path / "b.npz"
    path.write_bytes(npz(points=points.reshape(6, 10, 3)))
    assert read_cloud(path).organised is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_cloud_of_nothing_is_no_data(value: float, tmp_path: Path) -> None:
    path = tmp_path / "a.ply"
    path.write_bytes(ply(np.full((60, 3), value), "binary_little_endian"))
    with pytest.raises(ScanError, match=r"no valid point.*a\.ply") as error:
        read_cloud(path)
    assert error.value.code == "NO_DATA"


def test_point_spacing_stands_in_for_the_camera_pixel(tmp_path: Path) -> None:
    x, y = np.meshgrid(np.arange(80) * 0.25, np.arange(60) * 0.25)
    path = tmp_path / "a.npz"
    path.write_bytes(npz(points=np.stack([x, y, 0 * x], -1).reshape(-1, 3)))
    assert read_cloud(path).camera_pixel_mm == pytest.approx(0.25, rel=0.3)
    assert read_cloud(path, camera_pixel_mm=0.5).camera_pixel_mm == 0.5


BINARY = ply(POINTS, "binary_little_endian")
ASCII = ply(POINTS, "ascii")
COMPRESSED = pcd(POINTS, "binary_compressed")
BAD_CLOUDS: list[tuple[str, bytes, str]] = [
    ("a.ply", BINARY[:-100], r"truncated.*element vertex.*expected 60 rows, got 52"),
    ("a.ply", ASCII[: len(ASCII) - 200], r"truncated.*expected 60 rows|malformed"),
    ("a.ply", ASCII.replace(b"\n", b" extra\n", 12).replace(b" extra", b"", 11), "malformed"),
    ("a.ply", BINARY[:60], "header is cut off"),
    ("a.ply", b"hello", "not a PLY file"),
    ("a.ply", b"", "empty"),
    ("a.ply", BINARY.replace(b"float x", b"floot x"), "line 5"),
    ("a.ply", BINARY.replace(b"float x", b"float q"), "no fields x, y, z"),
    ("a.ply", BINARY.replace(b"vertex 60", b"vertex 6000000000000"), "truncated"),
    ("a.ply", BINARY.replace(b"vertex 60", b"vertex -1"), "negative"),
    ("a.ply", BINARY.replace(b"float y", b"float x"), "two properties of one name"),
    ("a.ply", BINARY.replace(b"binary_little", b"binary_middle"), "format unknown"),
    ("a.pcd", pcd(POINTS, "binary")[:-1], "truncated.*expected 60 points, got 59"),
    ("a.pcd", pcd(POINTS, "ascii")[:-300], "truncated"),
    ("a.pcd", COMPRESSED[:-10], "truncated"),
    ("a.pcd", COMPRESSED[:-40] + bytes(40), "damaged"),
    ("a.pcd", pcd(POINTS, "binary").replace(b"DATA binary", b"DATA zipped"), "kind unknown"),
    ("a.pcd", pcd(POINTS, "binary").replace(b"WIDTH 60", b"WIDTH 61"), "inconsistent"),
    ("a.pcd", pcd(POINTS, "binary").replace(b"TYPE F F F F\n", b""), "incomplete"),
    ("a.pcd", b"VERSION 0.7\nFIELDS x", "header is cut off"),
    ("a.npz", npz(points=POINTS)[:-50], "truncated or damaged"),
    ("a.npz", b"PK\x03\x04", "truncated or damaged"),
    ("a.npz", npz(weights=POINTS), "no array of points.*weights"),
    ("a.npz", npz(points=POINTS[:, :2]), r"float32 \[60, 2\]"),
    ("a.npz", npz(points=np.array(["a"] * 3).reshape(1, 3)), "wrong shape"),
    ("a.npz", npz(points=POINTS, intensity=GREY[:5]), "intensity.*expected 60, got 5"),
    ("a.npz", npz(points=np.array([[{}, 1, 2]], dtype=object)), "damaged"),
    ("a.xyz", b"1 2 3\n4 5\n", "line 2"),
    ("a.xyz", b"1 2\n", "line 1"),
    ("a.xyz", b"1 2 3\n4 5 x\n", "no number"),
    ("a.xyz", b"only words here\n", "no point"),
    ("a.e57", b"x", "format unknown"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_CLOUDS)
def test_bad_cloud_is_one_error_that_names_the_file(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(StationError, match=message) as error:
        read_cloud(tmp_path / name)
    assert name in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file.*none\.ply"):
        read_cloud(tmp_path / "none.ply")
    (tmp_path / "dir.ply").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_cloud(tmp_path / "dir.ply")


# A tetrahedron, edge 10.
TET_V = np.array([[0, 0, 0], [10, 0, 0], [0, 10, 0], [0, 0, 10]], np.float64)
TET_F = [(0, 2, 1), (0, 1, 3), (1, 2, 3), (0, 3, 2)]
OBJ = "".join(f"v {a} {b} {c}\n" for a, b, c in TET_V) + "".join(
    f"f {a + 1}/1/1 {b + 1}//2 {c + 1}\n" for a, b, c in TET_F
)
STL_ASCII = "solid t\n" + "".join(
    "facet normal 0 0 0\nouter loop\n"
    + "".join("vertex {} {} {}\n".format(*TET_V[k]) for k in face)
    + "endloop\nendfacet\n"
    for face in TET_F
)
STL = (
    bytes(80)
    + struct.pack("<I", 4)
    + b"".join(bytes(12) + TET_V[list(face)].astype("<f4").tobytes() + bytes(2) for face in TET_F)
)
PLY_HEAD = (
    "ply\nformat {} 1.0\nelement vertex 4\n"
    "property double x\nproperty double y\nproperty double z\n"
    "element face 4\nproperty list uchar int vertex_indices\nend_header\n"
)
PLY_ASCII = (
    PLY_HEAD.format("ascii")
    + "".join(f"{a} {b} {c}\n" for a, b, c in TET_V)
    + "".join(f"3 {a} {b} {c}\n" for a, b, c in TET_F)
)
PLY_BINARY = (
    PLY_HEAD.format("binary_little_endian").encode()
    + TET_V.tobytes()
    + b"".join(struct.pack("<Biii", 3, *face) for face in TET_F)
)


def _volume(vertices: NDArray[np.float64], faces: NDArray[np.int32]) -> float:
    a, b, c = (vertices[faces[:, k]] for k in range(3))
    return float(np.einsum("ij,ij->i", a, np.cross(b, c)).sum() / 6)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.obj", OBJ.encode()),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", "f -4 -2 -3").encode()),
        ("a.stl", (STL_ASCII + "endsolid t\n").encode()),
        ("a.stl", STL),
        ("a.stl", b"solid x" + STL[7:]),
        ("a.ply", PLY_ASCII.encode()),
        ("a.ply", PLY_BINARY),
    ],
)
def test_mesh_formats_give_the_same_solid(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    mesh = read_mesh(tmp_path / name)
    assert mesh.vertices.shape == (4, 3)
    assert mesh.faces.dtype == np.int32
    assert _volume(mesh.vertices, mesh.faces) == pytest.approx(1000 / 6)


def test_polygons_become_fans_and_metres_become_mm(tmp_path: Path) -> None:
    path = tmp_path / "a.obj"
    path.write_text("v 0 0 0\nv 0.01 0 0\nv 0.01 0.01 0\nv 0 0.01 0\nf 1 2 3 4\n")
    mesh = read_mesh(path)
    assert len(mesh.faces) == 2
    assert mesh.vertices.max() == pytest.approx(10)
    assert "taken as metre" in mesh.notes[0]
    assert read_mesh(path, unit="mm").vertices.max() == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.obj", OBJ.replace("v 10", "v ten").encode(), "line 2"),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", "f 1 2").encode(), "line 5"),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", "f 0 1 2").encode(), "line 5"),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", "f -9 1 2").encode(), "before the first"),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", "f 1 2 99").encode(), "does not exist"),
        ("a.obj", OBJ.replace("f 1/1/1 3//2 2", f"f 1 2 {10**21}").encode(), "line 5"),
        ("a.obj", OBJ.replace("v 10.0", "v nan").encode(), "not finite"),
        ("a.obj", b"v 1 2 3\n", "no faces"),
        ("a.obj", b"garbage", "no faces"),
        ("a.stl", STL[:-30], "truncated"),
        ("a.stl", STL[:50], "truncated"),
        ("a.stl", STL_ASCII.encode(), "truncated.*endsolid"),
        ("a.stl", STL_ASCII.replace("vertex 0", "vertex x", 1).encode() + b"endsolid", "line 4"),
        ("a.ply", PLY_BINARY[:-5], "truncated.*element face"),
        ("a.ply", PLY_ASCII[:-8].encode(), "truncated|malformed"),
        ("a.ply", PLY_ASCII.replace("3 0 2 1", "3 0 2 x").encode(), "face 0 malformed"),
        ("a.step", b"x", "format unknown"),
        ("a.obj", b"", "empty"),
    ],
)
def test_bad_mesh_is_one_error_that_names_the_file(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as error:
        read_mesh(tmp_path / name)
    assert name in str(error.value)


MESHES = Path(__file__).parents[2].parent / "shared" / "data" / "factory_meshes"


def _reader(name: str) -> Callable[[], Any]:
    return lambda: read_mesh(MESHES / name)


@pytest.mark.realdata
@pytest.mark.skipif(not MESHES.is_dir(), reason="recorded meshes not beside the checkout")
@pytest.mark.parametrize(
    ("name", "across_mm"),
    [("factory_bolt_m8_loose.obj", 13), ("factory_nut_m16_loose_subdiv_3x.obj", 24)],
)
def test_real_meshes_in_metres_come_in_mm(name: str, across_mm: float) -> None:
    mesh = _reader(name)()
    size = np.sort(np.ptp(mesh.vertices, axis=0))
    assert any("metre" in note for note in mesh.notes)
    assert 0.9 * across_mm < size[1] < 1.3 * across_mm
