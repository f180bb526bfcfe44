"""3D heads that speak GenICam 3D, through their GenTL producer, by Harvesters. Extra: genicam.

Address and options as for `harvesters`, and `output`: CalibratedABC_Grid (points as the device
computes them) or ProjectedC (its depth map: a third of the data); default: the first that it has.
Range is read, Intensity and Confidence where the device has them. What a frame carries is a whole
scan, packed into an image of bytes (`scan3d.pack`): so that a 3D head is a camera like any other
for supervisor and recorder. `capture.depth_head` makes the scanner of it.

CalibratedABC_Grid is proven against the virtual producer of the package genicam, ProjectedC against
a simulated device; neither against hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forge_station.capture import scan3d
from forge_station.capture.camera import Camera, CameraInfo, CameraSettings
from forge_station.capture.cameras import harvesters_, pixels
from forge_station.capture.cameras.sfnc import Value
from forge_station.capture.cameras.transport import (
    Buffer,
    Part,
    Transport,
    TransportCamera,
    checked_options,
)
from forge_station.capture.drivers import closed_on_error
from forge_station.capture.scan3d import GRID, PROJECTED, Axis, Geometry, Pinhole
from forge_station.errors import CameraSettingsError

DEFAULTS: Mapping[str, Value] = {**harvesters_.DEFAULTS, "output": ""}
_MAPS = ("CoordinateMapA", "CoordinateMapB")
_PLANES = 3


def open_gentl3d(settings: CameraSettings) -> Camera:
    """Open a head; how long that takes is up to the producer. Entry point `gentl3d`."""
    options = checked_options(settings, DEFAULTS)
    source = f"{settings.driver} {settings.address or '(only camera)'}"
    transport = harvesters_.HarvestersTransport(
        harvesters_.find_producer(options["producer"]), settings.address, source, options["buffers"]
    )
    with closed_on_error(transport):
        return RangeCamera(transport, settings, source)


@dataclass(frozen=True)
class Component:
    """One enabled component; `number` is its ComponentIDValue."""

    name: str
    number: int


class RangeCamera(TransportCamera):
    """A 3D head over any transport, as a camera whose images are packed scans."""

    def __init__(self, transport: Transport, settings: CameraSettings, source: str) -> None:
        self._components: tuple[Component, ...] = ()
        self._geometry = Geometry(GRID, (Axis(), Axis(), Axis()))
        super().__init__(transport, settings, source)

    def _prepare(self) -> None:
        """Choose what is sent: range, and what belongs to it."""
        features = self._sfnc
        listed = features.entries("ComponentSelector")
        if "Range" not in listed:
            raise CameraSettingsError(
                "the device sends no range",
                which=self._source,
                expected="Range among the components",
                got=", ".join(listed) or "no ComponentSelector",
                action="open it with the driver harvesters: it is a camera",
            )
        features.write("ComponentSelector", "Range")
        features.require("ComponentEnable", True)
        self._choose_output()
        wanted = ["Range", "Intensity", "Confidence"]
        if self._geometry.mode == PROJECTED:
            wanted += _MAPS
        found: list[Component] = []
        for name in listed:
            features.write("ComponentSelector", name)
            if name in wanted and name != "Range":
                features.offer("ComponentEnable", True)
            elif name not in wanted:
                features.offer("ComponentEnable", False)
            if name == "Range" or features.text("ComponentEnable") == "True":
                number = features.number(("ComponentIDValue",))
                found.append(Component(name, len(found) if number is None else int(number)))
        self._components = tuple(sorted(found, key=lambda component: component.number))

    def _choose_output(self) -> None:
        features = self._sfnc
        modes = [m for m in (GRID, PROJECTED) if m in features.entries("Scan3dOutputMode")]
        asked = str(self._settings.options.get("output", "")) or (modes[0] if modes else "")
        if asked not in modes:
            raise CameraSettingsError(
                "the device cannot send its range in this form",
                which=self._source,
                expected=f"one of {', '.join(modes)}" if modes else f"{GRID} or {PROJECTED}",
                got=asked or ", ".join(features.entries("Scan3dOutputMode")) or "nothing",
            )
        features.require("Scan3dOutputMode", asked)
        self._geometry = replace(self._geometry, mode=asked)

    def _refresh(self) -> None:
        super()._refresh()
        if self._components:
            self._sfnc.offer("ComponentSelector", "Range")
            self._geometry = self._read_geometry()

    def _read_geometry(self) -> Geometry:
        features = self._sfnc
        unit = features.text("Scan3dDistanceUnit") or "Millimeter"
        if unit not in scan3d.UNITS_MM:
            raise CameraSettingsError(
                "the device measures in a unit that is no length",
                which=f"{self._source}, Scan3dDistanceUnit",
                expected=", ".join(scan3d.UNITS_MM),
                got=unit,
            )
        axes = []
        for letter in "ABC":
            selected = features.offer("Scan3dCoordinateSelector", f"Coordinate{letter}")
            axes.append(self._axis() if selected or letter == "C" else Axis())
        focal = features.number(("Scan3dFocalLength",))
        pinhole = None
        if focal is not None:
            aspect = features.number(("Scan3dAspectRatio",))
            u, v = (features.number((f"Scan3dPrincipalPoint{letter}",)) for letter in "UV")
            pinhole = Pinhole(focal, 1.0 if aspect is None else aspect, u or 0.0, v or 0.0)
        return Geometry(
            self._geometry.mode, (axes[0], axes[1], axes[2]), scan3d.UNITS_MM[unit], pinhole
        )

    def _axis(self) -> Axis:
        features = self._sfnc
        scale = features.number(("Scan3dCoordinateScale",))
        flagged = features.text("Scan3dInvalidDataFlag") == "True"
        return Axis(
            scale=1.0 if scale is None else scale,
            offset=features.number(("Scan3dCoordinateOffset",)) or 0.0,
            invalid=features.number(("Scan3dInvalidDataValue",)) if flagged else None,
        )

    def describe(self) -> CameraInfo:
        info = super().describe()
        return replace(info, height=scan3d.PACKED_ROWS * info.height)

    def _image(self, buffer: Buffer) -> tuple[pixels.Image, str]:
        width, height = self._size
        if not buffer.parts:
            return np.zeros((scan3d.PACKED_ROWS * height, width), np.uint8), scan3d.PACKED
        parts = sort_parts(buffer.parts, self._components, self._source)
        return scan3d.pack(*decode(parts, self._geometry, self._source)), scan3d.PACKED


def sort_parts(
    parts: Sequence[Part], components: Sequence[Component], source: str
) -> dict[str, tuple[Part, ...]]:
    """The parts of a buffer by the component they are of; Range may have one for each coordinate.

    By the parts' own component ids; where the transport does not tell them, by their order, which
    is that of rising ids. Raises CameraSettingsError for what does not add up.
    """
    found: dict[str, tuple[Part, ...]] = {}
    if all(part.component is not None for part in parts):
        for component in components:
            own = tuple(part for part in parts if part.component == component.number)
            if own:
                found[component.name] = own
    else:
        left = list(parts)
        for component in components:
            apart = bool(left) and left[0].pixel_format in ("Coord3D_A16", "Coord3D_A32f")
            count = _PLANES if component.name == "Range" and apart else 1
            found[component.name], left = tuple(left[:count]), left[count:]
        if left:
            found = {}
    fits = all(own and _fits(name, own) for name, own in found.items())
    if "Range" not in found or not fits:
        raise CameraSettingsError(
            "the buffer's parts are not the components that were asked for",
            which=source,
            expected=", ".join(f"{c.name} (id {c.number})" for c in components),
            got=", ".join(part.pixel_format for part in parts),
        )
    return found


def _fits(name: str, parts: Sequence[Part]) -> bool:
    kinds = {"Range": ("Coord3D_",), "Confidence": ("Confidence", "Mono")}
    kinds |= dict.fromkeys(_MAPS, ("Coord3D_", "Mono"))
    kinds["Intensity"] = pixels.IMAGES
    return all(part.pixel_format.startswith(kinds[name]) for part in parts)


def decode(
    parts: Mapping[str, Sequence[Part]], geometry: Geometry, source: str
) -> tuple[scan3d.Float32, scan3d.Float32, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """(points [H, W, 3] mm, confidence [H, W] 0..1, intensity uint8 [H, W]) of one buffer.

    Without Confidence it is 1 at every point; without Intensity the confidence is shown instead.
    """
    raw = {
        name: [
            scan3d.values(part.data, part.pixel_format, part.width, part.height, part.padding)
            for part in own
        ]
        for name, own in parts.items()
        if name != "Intensity"
    }
    coordinates = raw["Range"]
    if geometry.mode == GRID:
        grid = np.dstack(coordinates)
        if grid.shape[2] != _PLANES:
            raise CameraSettingsError(
                "the range has not all three coordinates",
                which=source,
                expected=f"three for {GRID}",
                got=", ".join(part.pixel_format for part in parts["Range"]),
            )
        points = scan3d.grid_points(grid, geometry)
    else:
        maps = [raw[name][0] if name in raw else None for name in _MAPS]
        points = scan3d.projected_points(coordinates[-1], geometry, maps[0], maps[1])
    valid = np.isfinite(points[..., 2])
    confidence = valid.astype(np.float32)
    if "Confidence" in parts:
        part = parts["Confidence"][0]
        confidence = scan3d.confidence_of(raw["Confidence"][0], part.pixel_format)
    intensity = (confidence * 255).astype(np.uint8)
    if "Intensity" in parts:
        part = parts["Intensity"][0]
        image = pixels.image(part.data, part.pixel_format, part.width, part.height, part.padding)
        intensity = scan3d.grey_of(image, part.pixel_format)
    if not points.shape[:2] == confidence.shape == intensity.shape:
        raise CameraSettingsError(
            "range, confidence and intensity are not of one size",
            which=source,
            got=", ".join("x".join(map(str, x.shape)) for x in (points, confidence, intensity)),
            action="switch binning and regions of single components off in the head",
        )
    points[confidence <= 0] = np.nan
    confidence = np.where(np.isfinite(points[..., 2]), confidence, np.float32(0))
    return points, confidence, intensity
