"""3D heads by GenICam 3D: a real producer for the grid mode, a simulated device for the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_station.capture import base, depth_head, scan3d
from forge_station.capture.base import Frame, Trigger
from forge_station.capture.camera import CameraSettings, open_camera
from forge_station.capture.cameras import pixels
from forge_station.capture.cameras.transport import Buffer, Part
from forge_station.capture.depth_head import DepthHead, DepthHeadSettings, DepthScanner
from forge_station.capture.scan3d import Axis, Geometry, Pinhole
from forge_station.contract.error import ContractError
from forge_station.errors import (
    CameraNotFoundError,
    CameraSettingsError,
    CaptureError,
    FrameIncompleteError,
)
from tests.capture.conformance import CameraConformance
from tests.capture.fake_nodes import FakeNodes
from tests.capture.test_genicam_cameras import missing

W, H = 24, 16
PINHOLE = Pinhole(focal=400.0, aspect=1.02, u=11.5, v=7.0)


def scene() -> tuple[np.ndarray, np.ndarray]:
    """(points [H, W, 3] mm, their pixels [H, W, 2]): a slope, seen with a lens that bends rays."""
    rows, columns = np.indices((H, W), np.float64)
    bend = 1 + 1e-4 * ((columns - PINHOLE.u) ** 2 + (rows - PINHOLE.v) ** 2)
    a = PINHOLE.u + (columns - PINHOLE.u) * bend
    b = PINHOLE.v + (rows - PINHOLE.v) * bend
    z = 500 + 2 * columns + 3 * rows
    x = (a - PINHOLE.u) * z / PINHOLE.focal
    y = (b - PINHOLE.v) * z / (PINHOLE.focal * PINHOLE.aspect)
    return np.stack([x, y, z], axis=2), np.stack([a, b], axis=2)


def part(values: Any, pixel_format: str, component: int | None = None, padding: int = 0) -> Part:
    """One part of a buffer with its values in the bytes of its format."""
    values = np.asarray(values)
    wide = pixels.CODES[pixel_format] >> 16 & 0xFF in (16, 48)  # bits of a pixel
    kind = "<f4" if "32f" in pixel_format else "<u2" if wide else np.uint8
    rows = np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(values.shape[0], -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=255)
    height, width = values.shape[:2]
    if pixel_format.endswith("_Planar"):
        height //= 3
    return Part(rows.reshape(-1), pixel_format, width, height, padding, component)


class Device:
    """A 3D head as a transport: components, output modes, software trigger, multi-part buffers."""

    def __init__(self, parts: Sequence[Part], **nodes: Any) -> None:
        self.parts, self.sent, self.fail = tuple(parts), 0, 0
        features: dict[str, Any] = {
            "DeviceVendorName": "Sim", "DeviceModelName": "Head", "DeviceSerialNumber": "1",
            "Width": W, "Height": H, "PixelFormat": ("Coord3D_ABC32f",),
            "ComponentSelector": ("Normal", "Confidence", "Range", "Intensity"),
            "ComponentEnable": False, "ComponentIDValue": 0,
            "Scan3dOutputMode": ("ProjectedC", "CalibratedABC_Grid"),
            "Scan3dDistanceUnit": ("Millimeter", "Inch", "Pixel"),
            "Scan3dCoordinateSelector": ("CoordinateA", "CoordinateB", "CoordinateC"),
            "Scan3dCoordinateScale": 1.0, "Scan3dCoordinateOffset": 0.0,
            "Scan3dInvalidDataFlag": False, "Scan3dInvalidDataValue": 0.0,
            "Scan3dFocalLength": PINHOLE.focal, "Scan3dAspectRatio": PINHOLE.aspect,
            "Scan3dPrincipalPointU": PINHOLE.u, "Scan3dPrincipalPointV": PINHOLE.v,
            "TriggerMode": ("Off", "On"), "TriggerSource": ("Software",), "TriggerSoftware": 0,
            **nodes,
        }  # fmt: skip
        features = {name: value for name, value in features.items() if value is not None}
        axis = "Scan3dCoordinateSelector"
        self.nodes = FakeNodes(
            features,
            {
                "ComponentEnable": "ComponentSelector", "ComponentIDValue": "ComponentSelector",
                "Scan3dCoordinateScale": axis, "Scan3dCoordinateOffset": axis,
                "Scan3dInvalidDataFlag": axis, "Scan3dInvalidDataValue": axis,
            },
        )  # fmt: skip
        ids = {"Intensity": 1, "Range": 4, "Confidence": 6, "Normal": 9}
        for name, number in {**ids, "CoordinateMapA": 7, "CoordinateMapB": 8}.items():
            if name in self.nodes.entries("ComponentSelector"):
                self.nodes.set("ComponentSelector", name)
                self.nodes.set("ComponentIDValue", number)

    def select(self, selector: str, entry: str, **values: Any) -> Device:
        self.nodes.set(selector, entry)
        for name, value in values.items():
            self.nodes.set(name, value)
        return self

    def enabled(self) -> list[str]:
        found = []
        for name in self.nodes.entries("ComponentSelector"):
            self.nodes.set("ComponentSelector", name)
            if self.nodes.get("ComponentEnable"):
                found.append(name)
        return found

    def identity(self) -> tuple[str, str, str]:
        return "Sim", "Head", "1"

    def version(self) -> str:
        return "1"

    def start(self) -> None: ...

    def pop(self, timeout_s: float) -> Buffer | None:
        if len(self.nodes.executed) == self.sent and self.nodes.get("TriggerMode") == "On":
            time.sleep(timeout_s)
            return None
        self.sent += 1
        if self.fail:
            self.fail -= 1
            return Buffer((), complete=False, frame_id=self.sent)
        return Buffer(self.parts, frame_id=self.sent)

    def ready(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None: ...

    def lost(self) -> str:
        return ""

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def gentl3d() -> Any:
    pytest.importorskip("harvesters", reason="needs the extra genicam")
    from forge_station.capture.cameras import gentl3d

    return gentl3d


def scan(gentl3d: Any, device: Device, **options: Any) -> base.Scan:
    """One scan by the head's own way: camera, trigger, frame, unpacking."""
    settings = DepthHeadSettings("top", CameraSettings("gentl3d", "1", options=options))
    camera = gentl3d.RangeCamera(device, settings.camera, "head 1")
    with closing(DepthScanner([DepthHead(settings, camera)])) as scanner:
        return scanner.capture(Trigger("S1"))[0]


def test_a_grid_becomes_points_intensity_and_confidence(gentl3d: Any) -> None:
    points, _ = scene()
    sent = points.astype(np.float32)
    sent[3, 5] = 0  # a hole, as devices without an invalid value mark it
    grey = 10 * np.arange(H * W, dtype=np.uint16).reshape(H, W)
    confidence = np.full((H, W), 255)
    confidence[0, 0] = 0
    device = Device(
        [part(grey, "Mono12"), part(sent, "Coord3D_ABC32f"), part(confidence, "Confidence8")]
    )
    got = scan(gentl3d, device, output="CalibratedABC_Grid")
    assert device.enabled() == ["Confidence", "Range", "Intensity"]
    holes = np.isnan(got.points).any(axis=2)
    assert np.argwhere(holes).tolist() == [[0, 0], [3, 5]]
    assert np.abs(got.points - points)[~holes].max() < 1e-4
    assert got.points.dtype == np.float32 and got.frame == "camera"
    assert np.array_equal(got.intensity, grey >> 4)
    assert got.confidence[1, 1] == 1 and got.confidence[0, 0] == 0 and got.confidence[3, 5] == 0
    assert got.quality.valid_share == pytest.approx(1 - 2 / (H * W)) and not got.quality.flags
    step = np.linalg.norm(np.diff(points[..., :2], axis=1), axis=2)
    assert got.camera_pixel_mm == pytest.approx(np.median(step), rel=0.05)


def test_integers_are_scaled_shifted_and_freed_of_the_invalid_value(gentl3d: Any) -> None:
    points, _ = scene()
    axes = {"A": (0.01, -20.0), "B": (0.01, -20.0), "C": (0.02, 100.0)}
    raw = np.stack(
        [np.rint((points[..., k] - o) / s) for k, (s, o) in enumerate(axes.values())], axis=2
    )
    raw[5, 6, 2] = 65535
    raw[7, 7] = 0  # a value like any other where an invalid one is named
    device = Device([part(raw, "Coord3D_ABC16", padding=6)], ComponentSelector=("Range",))
    for letter, (scale, offset) in axes.items():
        device.select(
            "Scan3dCoordinateSelector", f"Coordinate{letter}", Scan3dCoordinateScale=scale,
            Scan3dCoordinateOffset=offset, Scan3dInvalidDataFlag=letter == "C",
            Scan3dInvalidDataValue=65535.0,
        )  # fmt: skip
    got = scan(gentl3d, device, output="CalibratedABC_Grid")
    assert np.argwhere(np.isnan(got.points[..., 0])).tolist() == [[5, 6]]
    assert got.points[7, 7].tolist() == [-20, -20, 100]
    known = ~np.isnan(got.points).any(axis=2)
    known[7, 7] = False
    assert np.abs(got.points - points)[known].max() < 0.011
    assert (got.intensity[known] == 255).all()  # no Intensity: the confidence is shown


def test_a_depth_map_becomes_points_by_the_maps_of_the_device(gentl3d: Any) -> None:
    points, at = scene()
    depth = points[..., 2].astype(np.float32) / 25.4
    depth[2, 2] = -1.0
    components = ("Range", "CoordinateMapA", "CoordinateMapB", "Intensity")
    nodes = {"ComponentSelector": components, "Scan3dDistanceUnit": ("Inch", "Millimeter")}
    device = Device(
        [
            part(np.full((H, W), 90), "Mono8", 1),
            part(depth, "Coord3D_C32f", 4),
            part(at[..., 0], "Coord3D_A32f", 7),
            part(at[..., 1], "Coord3D_B32f", 8),
        ],
        **nodes,
    )
    got = scan(gentl3d, device, output="ProjectedC")
    assert set(device.enabled()) == set(components)
    assert np.argwhere(np.isnan(got.points[..., 2])).tolist() == [[2, 2]]
    known = ~np.isnan(got.points).any(axis=2)
    assert np.abs(got.points - points)[known].max() < 1e-3
    assert (got.intensity == 90).all()


def test_a_depth_map_without_maps_goes_by_row_and_column() -> None:
    depth = np.full((H, W), 400.0, np.float32)
    geometry = Geometry(scan3d.PROJECTED, (Axis(), Axis(), Axis()), 1.0, PINHOLE)
    points = scan3d.projected_points(depth, geometry)
    assert points[0, 0].tolist() == pytest.approx([-11.5, -7.0 / 1.02, 400.0])
    shifted = replace(geometry, axes=(Axis(2.0, 1.0), Axis(), Axis()))
    assert scan3d.projected_points(depth, shifted)[0, 3, 0] == pytest.approx(7 - 11.5)
    for missing_pinhole in (None, replace(PINHOLE, focal=0.0)):
        with pytest.raises(CameraSettingsError, match="focal length"):
            scan3d.projected_points(depth, replace(geometry, pinhole=missing_pinhole))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_point_is_whole_or_invalid(bad: float) -> None:
    geometry = Geometry(scan3d.PROJECTED, (Axis(), Axis(), Axis()), 25.4, PINHOLE)
    depth, a = np.full((H, W), 400.0, np.float32), np.zeros((H, W), np.float32)
    depth[1, 1], a[2, 3] = bad, bad
    grid = np.full((H, W, 3), 7.0, np.float32)
    grid[1, 1, 2] = grid[2, 3, 0] = bad
    with np.errstate(over="ignore"):
        projected = scan3d.projected_points(depth, geometry, a, np.zeros_like(a))
        organised = scan3d.grid_points(grid, replace(geometry, mode=scan3d.GRID))
    for points in (projected, organised):
        unseen = np.isnan(points)
        assert np.argwhere(unseen.any(axis=2)).tolist() == [[1, 1], [2, 3]]
        assert (unseen.any(axis=2) == unseen.all(axis=2)).all()
        assert np.isfinite(points[~unseen]).all()


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("kind", ["interleaved", "planar", "three parts"])
def test_parts_are_told_apart_by_id_or_by_the_order_of_ids(
    gentl3d: Any, kind: str, by_id: bool
) -> None:
    points, _ = scene()
    sent = points.astype(np.float32)
    number = 4 if by_id else None
    if kind == "interleaved":
        ranges = [part(sent, "Coord3D_ABC32f", number)]
    elif kind == "planar":
        planes = sent.transpose(2, 0, 1).reshape(3 * H, W)
        ranges = [part(planes, "Coord3D_ABC32f_Planar", number)]
    else:
        ranges = [part(sent[..., k], f"Coord3D_{'ABC'[k]}32f", number) for k in range(3)]
    grey = part(np.full((H, W), 7), "Mono8", 1 if by_id else None)
    sure = part(np.full((H, W), 65535), "Confidence16", 6 if by_id else None)
    parts = [sure, *ranges, grey] if by_id else [grey, *ranges, sure]
    got = scan(gentl3d, Device(parts), output="CalibratedABC_Grid")
    assert np.abs(got.points - points).max() < 1e-4
    assert (got.intensity == 7).all() and (got.confidence == 1).all()


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ({"ComponentSelector": ("Intensity",)}, {}, r"no range .*got Intensity"),
        ({"Scan3dOutputMode": ("DisparityC",)}, {}, r"in this form.*got DisparityC"),
        ({"Scan3dOutputMode": None}, {}, r"in this form.*got nothing"),
        ({}, {"output": "Mesh"}, r"expected one of CalibratedABC_Grid, ProjectedC, got Mesh"),
        ({"Scan3dDistanceUnit": ("Pixel",)}, {}, r"unit that is no length.*got Pixel"),
    ],
)
def test_a_device_that_cannot_is_refused_when_it_is_opened(
    gentl3d: Any, nodes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CameraSettingsError, match=message):
        scan(gentl3d, Device([], **nodes), **options)


def test_parts_that_do_not_add_up_are_refused(gentl3d: Any) -> None:
    points, _ = scene()
    grid, grey = part(points, "Coord3D_ABC32f"), part(points[..., 2], "Mono8")
    small = part(points[: H // 2, :, 2], "Mono8")
    sure = part(np.ones((H, W)), "Confidence8")
    for parts, message in (
        ([grid, grey, sure], r"expected Intensity \(id 1\), Range \(id 4\)"),
        ([grey, grid, sure, sure], "not the components"),
        ([grey, part(points[..., 2], "Coord3D_C32f"), sure], "not all three coordinates"),
        ([small, grid, sure], r"not of one size.*8x24"),
    ):
        with pytest.raises(CameraSettingsError, match=message):
            scan(gentl3d, Device(parts), output="CalibratedABC_Grid")


def test_a_broken_scan_is_taken_again_once(gentl3d: Any) -> None:
    points, _ = scene()
    parts = [part(points[..., 2], "Mono8"), part(points, "Coord3D_ABC32f")]
    nodes = {"ComponentSelector": ("Range", "Intensity")}
    device = Device(parts, **nodes)
    device.fail = 1
    assert scan(gentl3d, device).quality.valid_share == 1
    device.fail = 2
    with pytest.raises(FrameIncompleteError, match="top"):
        scan(gentl3d, device)


def test_packing_is_lossless_and_fits_any_size() -> None:
    rng = np.random.default_rng(2)
    for height, width in ((1, 1), (3, 5), (16, 7)):
        points = rng.normal(size=(height, width, 3)).astype(np.float32)
        points[0, 0] = np.nan
        confidence = rng.random((height, width), np.float32)
        grey = rng.integers(0, 256, (height, width), np.uint8)
        packed = scan3d.pack(points, confidence, grey)
        assert packed.shape == (scan3d.PACKED_ROWS * height, width)
        got = scan3d.unpack(packed)
        for one, other in zip(got, (points, confidence, grey), strict=True):
            assert np.array_equal(one, other, equal_nan=True)


def test_the_pose_of_a_head_takes_its_points_to_the_tray() -> None:
    points = np.full((2, 2, 3), [1.0, 2.0, 300.0], np.float32)
    points[0, 0] = np.nan
    packed = scan3d.pack(points, np.ones((2, 2), np.float32), np.zeros((2, 2), np.uint8))
    frame = Frame(packed, 1, pixel_format=scan3d.PACKED)
    pose = ((1, 0, 0, 10), (0, -1, 0, 20), (0, 0, -1, 300), (0, 0, 0, 1))
    got = depth_head.scan_of(frame, pose)
    assert got.frame == "tray" and got.points[1, 1].tolist() == [11, 18, 0]
    assert np.isnan(got.points[0, 0]).all()
    dark = scan3d.pack(
        np.full_like(points, np.nan), np.zeros((2, 2), np.float32), np.zeros((2, 2), np.uint8)
    )
    flags = depth_head.scan_of(replace(frame, image=dark)).quality.flags
    assert flags == (base.NO_DATA, base.LOW_COVERAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout_s": 1000.0}, "timeout_s"),
        (
            {"tray_from_camera": ((1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))},
            "rotation",
        ),
        (
            {"tray_from_camera": ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, -1, 0), (0, 0, 0, 1))},
            "rotation",
        ),
    ],
)
def test_wrong_settings_of_a_head_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        DepthHeadSettings(**{"name": "top", "camera": CameraSettings("gentl3d"), **change})


def test_several_heads_need_their_places_and_a_known_driver() -> None:
    one = DepthHeadSettings("a", CameraSettings("gentl3d", "1"))
    heads: list[Any] = [DepthHead(one, None), DepthHead(one, None)]  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="tray_from_camera of each"):
        DepthScanner(heads)
    with pytest.raises(CaptureError, match="without heads"):
        DepthScanner([])
    with pytest.raises(CameraNotFoundError, match="head a: teleview"):
        depth_head.open_depth_heads([replace(one, camera=CameraSettings("teleview"))])


@pytest.fixture
def virtual() -> CameraSettings:
    """The virtual producer: a ball that rises and falls on a plane, 400 x 400, in mm."""
    try:
        import genicam
        import harvesters  # noqa: F401
    except ModuleNotFoundError:
        missing("harvesters", "pip install forge-station[genicam]")
    producer = str(Path(genicam.__file__).parent / "viky.cti")
    return CameraSettings(
        "gentl3d", "VikyTL_DEV_blue", fps=50, options={"producer": producer, "Width": 200}
    )


class TestGenTl3d(CameraConformance):
    @pytest.fixture
    def settings(self, virtual: CameraSettings) -> CameraSettings:
        return virtual


def test_a_real_producer_is_scanned_in_a_process_of_its_own(virtual: CameraSettings) -> None:
    settings = DepthHeadSettings("top", virtual, recover_s=30)
    with closing(depth_head.open_depth_heads([settings])) as scanner:
        got = [scanner.capture(Trigger(f"S{k}"))[0] for k in range(2)]
    for one in got:
        height, width = one.intensity.shape
        assert width == 200 and one.points.shape == (height, width, 3)
        rows, columns = np.indices((height, width))
        valid = np.isfinite(one.points[..., 2])
        assert one.quality.valid_share == pytest.approx(valid.mean()) and valid.mean() > 0.99
        assert np.abs(one.points[..., 0] - columns)[valid].max() == 0
        assert np.abs(one.points[..., 1] - rows)[valid].max() == 0
        assert one.camera_pixel_mm == 1
        assert 0 < np.nanmax(one.points[..., 2]) < 400  # the ball
        assert set(np.unique(one.intensity)) - {0}
    cloud = base.fuse(got[:1])
    assert len(cloud.points) == int(np.isfinite(got[0].points[..., 2]).sum())


def test_a_camera_is_no_3d_head(virtual: CameraSettings) -> None:
    camera = open_camera(replace(virtual, driver="harvesters", options={**virtual.options}))
    settings = DepthHeadSettings("top", virtual)
    with (
        closing(DepthHead(settings, camera)) as head,
        pytest.raises(CameraSettingsError, match=r"no scans .*got RGBa8"),
    ):
        head.scan(Trigger("S1"))
