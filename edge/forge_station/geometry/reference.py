"""The same part without a defect: depth maps that a scanned part is compared with.

In inspection the part number is known, so a defect is what differs from the sound part. A
reference holds, for every way the part can lie, its depth seen from four sides and from above. The
scanned part is fitted to it (rest pose, quarter turns, then a robust rigid fit) and the distance
between the two surfaces becomes the third channel of the surface picture.

Made from clouds of sound parts (`build`): scans of good parts or a model's surface. Knows no model
names and no files (see `reference_io`). Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.views import AXES, VIEWS
from forge_station.geometry import render
from forge_station.geometry.render import ByteImage, FloatImage, View
from forge_station.geometry.sheet import robust_box

SIDE = 224
"""Pixels of a depth map's side."""
TURNS = 4
GAIN = 20.0
"""Grey levels of the difference for one pixel of the surface picture."""
MISSING, EXTRA = 32, 255
"""Grey levels where only the reference, or only the part, has a surface."""
MOST_MISFIT_PX, THIN_MISFIT_PX, THIN = 4.0, 1.0, 1.0
"""Above such a misfit (see `Fit`) a comparison is unsound: of any part; and of one with fewer than
`THIN` points to a pixel of its surface, which is seen through. Simulated scans (2026-11-30): sound
parts 0.2 to 1.2, defective ones up to 2.8 (bent by 65 px), with 1.9 points a pixel or more; thinned
to 0.5 to 0.7 points a pixel 1.2 to 3.8; on the reference of another part 5.1 to 6.0, of a similar
screw 2.6 to 3.4, which only its size tells apart."""
Transform = NDArray[np.float64]
Point = tuple[float, float, float]
# Points a view in the search over poses and in the fit, how many candidates are fitted, and the
# distance (px) that counts as off. Round by round, the distance from which a point has no weight.
_SEARCH_POINTS, _FIT_POINTS, _FITTED, _FAR_PX = 250, 1500, 2, 6.0
_REACH_PX = (12.0, 8.0, 5.0, 3.0, 2.0, 1.5, 1.5)
_DAMPING = 1e-3


@dataclass(frozen=True)
class RestView:
    """One way to lie. `depth` [5, SIDE, SIDE] float32 mm towards the viewer, NaN where empty.

    Maps 0..3: the front view of the part turned by -90 degrees times the map's number about z; map
    4: from above. x and y count from the middle of the box, z from `middle_mm` above the tray.
    """

    depth: FloatImage
    mm_per_px: float
    middle_mm: float


@dataclass(frozen=True)
class Reference:
    """A sound part in all its rest poses."""

    poses: tuple[RestView, ...]


@dataclass(frozen=True)
class _Map:
    """A depth map [SIDE, SIDE] mm; its slopes (mm a mm) are worked out when they are needed."""

    depth: FloatImage
    mm_per_px: float

    @cached_property
    def right(self) -> FloatImage:
        return render.slope(self.depth, 1) / np.float32(self.mm_per_px)

    @cached_property
    def up(self) -> FloatImage:
        return -render.slope(self.depth, 0) / np.float32(self.mm_per_px)


@dataclass(frozen=True)
class Fit:
    """How a part lies on its reference.

    `misfit`: mean distance in pixels of the picture, each point counted up to 6 px; `pose`, `turn`:
    what fitted best; `moved`: reference from part; `centre`: the part's middle, mm.
    """

    misfit: float
    pose: int
    turn: int
    moved: Transform
    centre: Point
    maps: Mapping[str, _Map]

    def difference(self, view: View, name: str, middle: Point | None = None) -> FloatImage:
        """Distance of each pixel's surface to the reference, [H, W] float32 in pixels of the view.

        Positive where the part stands out, NaN where either has no surface. `middle`: the point of
        the part frame in the middle of the view, mm; None: `centre`.
        """
        out = np.full(view.depth.shape, np.nan, np.float32)
        at = np.flatnonzero(view.filled)
        points = _points(view, name, self.centre, at, self._off(name, middle))
        far = _distances(_moved(points, self.moved), name, self.maps[name])
        out.ravel()[at] = far / view.mm_per_px
        return out

    def channel(self, view: View, name: str, middle: Point | None = None) -> ByteImage:
        """The difference as grey, [H, W]: 128 on the reference, more where the part stands out."""
        off = self._off(name, middle)
        difference = self.difference(view, name, middle)
        return _drawn(difference, view, name, self.maps[name], self.moved, off)

    def _off(self, name: str, middle: Point | None) -> tuple[float, float]:
        """From the part's middle to the view's, (right, up) mm."""
        if middle is None:
            return 0.0, 0.0
        axes = AXES[name]
        return (
            middle[axes.right] - self.centre[axes.right],
            middle[axes.up] - self.centre[axes.up],
        )


def misfit_limit(views: Mapping[str, View], points: int) -> float:
    """Up to which misfit the comparison of a part of so many points is sound, px."""
    shown = sum(int(view.filled.sum()) for view in views.values())
    return THIN_MISFIT_PX if points < THIN * shown else MOST_MISFIT_PX


def build(clouds: Sequence[NDArray[np.floating]]) -> Reference:
    """Clouds [N, 3] mm of a sound part in its part frame, one for every way it can lie."""
    if not clouds:
        raise ValueError("a reference needs at least one cloud of a sound part, got none")
    return Reference(tuple(_rest_view(np.asarray(cloud, np.float32)) for cloud in clouds))


def _rest_view(points: NDArray[np.float32]) -> RestView:
    box = robust_box(points)
    side = max(box.extent(axis) for axis in range(3))
    mm_per_px = max(side / (SIDE * (1 - 1 / 14)), 1e-4)
    middle = box.centre
    own = points - np.asarray([middle[0], middle[1], 0.0], np.float32)
    centre = (0.0, 0.0, middle[2])
    maps = []
    for turn in range(TURNS):
        turned = _turned(own, -turn)
        maps.append(render.view_depth(turned, "front", mm_per_px, (SIDE, SIDE), centre).depth)
    top = render.view_depth(own, "top", mm_per_px, (SIDE, SIDE), centre).depth
    maps.append(top - np.float32(middle[2]))
    return RestView(np.stack(maps), mm_per_px, middle[2])


def _turned(points: NDArray[np.float32], quarters: int) -> NDArray[np.float32]:
    """Points turned about z by a number of quarter turns, counter-clockwise."""
    x, y, z = points.T
    for _ in range(quarters % TURNS):
        x, y = -y, x
    return np.stack([x, y, z], axis=1)


def fit(views: Mapping[str, View], centre: Point, reference: Reference) -> Fit:
    """Fit a part's rendered views (see `sheet.surface_picture`) to its reference.

    `centre` mm: the point of the part frame in the middle of every view.
    """
    pixel = views[VIEWS[0]].mm_per_px
    few = {name: _samples(views[name], name, centre, _SEARCH_POINTS) for name in VIEWS}
    tried = []
    for pose, rest in enumerate(reference.poses):
        start = _lifted(centre[2] - rest.middle_mm)
        for turn in range(TURNS):
            rate = _rated(few, _maps(rest, turn), start, pixel, _gaps)
            tried.append((rate, pose, turn))
    many = {name: _samples(views[name], name, centre, _FIT_POINTS) for name in VIEWS}
    found = []
    for _, pose, turn in sorted(tried)[:_FITTED]:
        rest = reference.poses[pose]
        maps = _maps(rest, turn)
        moved = _fitted(many, maps, _lifted(centre[2] - rest.middle_mm), pixel)
        found.append((_rated(many, maps, moved, pixel, _distances), pose, turn, moved))
    misfit, pose, turn, moved = min(found, key=lambda item: item[:3])
    return Fit(misfit, pose, turn, moved, centre, _maps(reference.poses[pose], turn))


def _maps(rest: RestView, turn: int) -> dict[str, _Map]:
    """The reference's front, side and top after `turn` quarter turns about z."""
    chosen = {
        "front": rest.depth[-turn % TURNS],
        "side": rest.depth[(1 - turn) % TURNS],
        "top": np.rot90(rest.depth[TURNS], turn),
    }
    return {name: _Map(depth, rest.mm_per_px) for name, depth in chosen.items()}


def _lifted(height_mm: float) -> Transform:
    """Reference from part, [3, 4]: no turn, moved up."""
    out = np.eye(3, 4)
    out[2, 3] = height_mm
    return out


def _samples(view: View, name: str, centre: Point, count: int) -> NDArray[np.float64]:
    """At most `count` surface points [N, 3] of a view, mm from `centre`, even over the surface."""
    at = np.flatnonzero(view.filled)
    if len(at) > count:
        at = at[(np.arange(count) * (len(at) / count)).astype(np.int64)]
    return _points(view, name, centre, at)


def _points(
    view: View,
    name: str,
    centre: Point,
    at: NDArray[np.int64],
    off: tuple[float, float] = (0.0, 0.0),
) -> NDArray[np.float64]:
    """Surface points [N, 3] of pixels `at`, mm from `centre`, `off` from which the view is."""
    axes = AXES[name]
    height, width = view.depth.shape
    out = np.empty((len(at), 3))
    out[:, axes.right] = (at % width + 0.5 - width / 2) * view.mm_per_px + off[0]
    out[:, axes.up] = (height / 2 - at // width - 0.5) * view.mm_per_px + off[1]
    out[:, axes.towards] = view.depth.ravel()[at] * axes.sign - centre[axes.towards]
    return out


def _gaps(points: NDArray[np.float64], name: str, target: _Map) -> NDArray[np.float64]:
    """How far points [N, 3] lie before the reference's depth map, mm [N]; NaN beside it."""
    row, column, inside, _, _ = _pixels(points, name, target)
    depth = target.depth[row, column].astype(np.float64)
    axes = AXES[name]
    return np.where(inside, points[:, axes.towards] * axes.sign - depth, np.nan)


def _distances(points: NDArray[np.float64], name: str, target: _Map) -> NDArray[np.float64]:
    """Distance of points [N, 3] to the reference's surface, mm [N]; NaN beside it."""
    return _residuals(points, name, target)[0]


def _residuals(
    points: NDArray[np.float64], name: str, target: _Map
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distance to the surface [N] mm, NaN where there is none, and its unit normals [N, 3]."""
    axes = AXES[name]
    row, column, inside, right, down = _pixels(points, name, target)
    slope_right = target.right[row, column].astype(np.float64)
    slope_up = target.up[row, column].astype(np.float64)
    # first order from the middle of the pixel
    depth = target.depth[row, column] + target.mm_per_px * (slope_right * right - slope_up * down)
    normals = np.zeros((len(points), 3))
    normals[:, axes.towards] = axes.sign
    normals[:, axes.right] = -slope_right
    normals[:, axes.up] = -slope_up
    length = np.sqrt(1.0 + slope_right**2 + slope_up**2)
    gap = np.where(inside, points[:, axes.towards] * axes.sign - depth, np.nan)
    return gap / length, normals / length[:, None]


def _pixels(points: NDArray[np.float64], name: str, target: _Map) -> tuple[Any, ...]:
    """(row, column, inside, right, down): the pixel of each point and its place in it (px)."""
    axes = AXES[name]
    right = points[:, axes.right] / target.mm_per_px + SIDE / 2
    down = SIDE / 2 - points[:, axes.up] / target.mm_per_px
    column, row = right.astype(np.int64), down.astype(np.int64)
    inside = (right >= 0) & (column < SIDE) & (down >= 0) & (row < SIDE)
    column, row = np.where(inside, column, 0), np.where(inside, row, 0)
    return row, column, inside, right - column - 0.5, down - row - 0.5


def _rated(
    samples: Mapping[str, NDArray[np.float64]],
    maps: Mapping[str, _Map],
    moved: Transform,
    pixel: float,
    measure: Callable[[NDArray[np.float64], str, _Map], NDArray[np.float64]],
) -> float:
    """Mean distance in pixels; further than `_FAR_PX`, or beside the reference, counts that."""
    found = [
        np.nan_to_num(np.abs(measure(_moved(points, moved), name, maps[name])) / pixel, nan=_FAR_PX)
        for name, points in samples.items()
    ]
    every = np.concatenate(found)
    return float(np.minimum(every, _FAR_PX).mean()) if len(every) else _FAR_PX


def _fitted(
    samples: Mapping[str, NDArray[np.float64]],
    maps: Mapping[str, _Map],
    moved: Transform,
    pixel: float,
) -> Transform:
    """Robust fit, point to plane, Tukey's weights whose reach shrinks from round to round.

    Shift, turn, and the three lengths: sound parts differ within their tolerance.
    """
    reach_mm = max(float(np.abs(points).max(initial=0.0)) for points in samples.values()) or 1.0
    for reach in _REACH_PX:
        normal = np.zeros((9, 9))
        pull = np.zeros(9)
        total = 0.0
        for name, points in samples.items():
            own = _moved(points, moved)
            gap, normals = _residuals(own, name, maps[name])
            near = np.flatnonzero(np.abs(gap) < reach * pixel)
            gap, normals, own = gap[near], normals[near], own[near] / reach_mm
            weight = (1.0 - (gap / (reach * pixel)) ** 2) ** 2
            rows = np.concatenate([normals, np.cross(own, normals), own * normals], axis=1)
            normal += rows.T @ (rows * weight[:, None])
            pull -= rows.T @ (gap * weight)
            total += float(weight.sum())
        # Round parts can turn and long ones can slide unseen: damping keeps them where they are.
        normal += np.eye(9) * (_DAMPING * total + 1e-9)
        step = np.linalg.solve(normal, pull)
        turn, _ = cv2.Rodrigues(step[3:6] / reach_mm)
        change = np.diag(1.0 + step[6:] / reach_mm) @ turn
        moved = change @ moved
        moved[:, 3] += step[:3]
    return moved


def _moved(points: NDArray[np.float64], transform: Transform) -> NDArray[np.float64]:
    return np.asarray(points @ transform[:, :3].T + transform[:, 3])


def _drawn(
    difference: FloatImage,
    view: View,
    name: str,
    target: _Map,
    moved: Transform,
    off: tuple[float, float],
) -> ByteImage:
    """The channel: 128 on the reference, more where the part stands out, 0 in the background."""
    grey = np.clip(np.rint(128.0 + GAIN * np.nan_to_num(difference)), 48, 224).astype(np.uint8)
    compared = np.isfinite(difference)
    out = np.where(compared, grey, np.where(view.filled, EXTRA, 0)).astype(np.uint8)
    # The reference's outline, placed by the fit's shift and its turn within the view.
    axes = AXES[name]
    height, width = view.depth.shape
    scale = view.mm_per_px / target.mm_per_px
    into = np.array(
        [
            [moved[axes.right, axes.right], -moved[axes.right, axes.up], moved[axes.right, 3]],
            [-moved[axes.up, axes.right], moved[axes.up, axes.up], -moved[axes.up, 3]],
        ]
    )
    started = into[:, 2] + into[:, :2] @ np.array([off[0], -off[1]])
    into[:, :2] *= scale
    middle = np.array([width / 2 - 0.5, height / 2 - 0.5])
    shift = started / target.mm_per_px + (SIDE / 2 - 0.5) - into[:, :2] @ middle
    matrix = np.concatenate([into[:, :2], shift[:, None]], axis=1)
    surface = np.isfinite(target.depth).astype(np.uint8)
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    there = cv2.warpAffine(surface, matrix, (width, height), flags=flags)
    out[(there > 0) & ~view.filled] = MISSING
    return out
