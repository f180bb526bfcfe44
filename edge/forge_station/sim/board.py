"""A calibration board under the simulated head: its print as albedo of the plane, and poses.

The board takes the place of the tray: it is the plane z = 0 of the tray frame, its middle in the
origin, x along its columns, z towards the viewer. It is flat and printed without error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import PatternStack
from forge_station.capture.board import Board
from forge_station.capture.calibration import Calibration
from forge_station.sim import scanner

Float = NDArray[np.float64]
PAPER, INK, BENCH = 0.75, 0.08, 0.3
"""Albedo of the print, and of what lies around the board."""
_SUBPIXELS = 4
_PX_PER_MM = 8
# Of the board in front of the camera: x, y, z of its middle in half fields and ranges; tilt about
# the image's x and y, turn about the view, degrees.
_GUIDED: tuple[tuple[float, float, float, float, float, float], ...] = (
    (0.0, 0.0, 1.00, 3, -3, 4), (-0.3, -0.3, 1.03, 25, 25, 8), (0.3, -0.3, 1.03, 25, -25, -8),
    (-0.3, 0.3, 1.03, -25, 25, 98), (0.3, 0.3, 1.03, -25, -25, 12), (0.0, 0.0, 0.93, 35, 0, 96),
    (0.0, 0.0, 1.08, -35, 0, 7), (-0.15, 0.0, 0.96, 0, 35, 186), (0.15, 0.0, 1.06, 0, -35, 45),
    (-0.4, 0.0, 1.10, 10, -20, 6), (0.4, 0.0, 1.10, -10, 20, -5), (0.0, -0.4, 1.10, -20, 8, 9),
    (0.0, 0.4, 1.10, 20, -8, -7), (0.0, 0.0, 0.88, 15, 15, 30), (-0.35, -0.35, 1.15, -12, 30, 60),
    (0.35, 0.35, 1.15, 30, -14, 120),
)  # fmt: skip


def poses(count: int, head: Calibration) -> Iterator[Float]:
    """board_from_camera float64 [4, 4] of `count` poses (16 at most): tilted, all over the field.

    The positions follow the field of view and the range of the head.
    """
    camera, reach = head.camera, head.range_mm or scanner.RANGE_MM
    half_x = reach * camera.image_size[0] / 2 / camera.matrix[0, 0]
    half_y = reach * camera.image_size[1] / 2 / camera.matrix[1, 1]
    for x, y, z, about_x, about_y, turn in _GUIDED[:count]:
        tilt = scanner.rotation(np.radians([about_x, about_y, 0.0]))
        camera_from_board = np.eye(4)
        facing = np.diag([1.0, -1.0, -1.0])
        spun = scanner.rotation(np.array([0.0, 0.0, math.radians(turn)]))
        camera_from_board[:3, :3] = tilt @ facing @ spun
        camera_from_board[:3, 3] = x * half_x, y * half_y, z * reach
        yield np.asarray(np.linalg.inv(camera_from_board), np.float64)


def simulate(
    board: Board,
    head: Calibration,
    board_from_camera: Float,
    rng: np.random.Generator,
    *,
    exposures: tuple[float, ...] = (1.0,),
) -> PatternStack:
    """Images that `head` takes of the board. The stack names `head` as its calibration."""
    posed = replace(head, tray_from_camera=board_from_camera)
    stack = scanner.simulate(
        [],
        posed,
        rng,
        exposures=exposures,
        registration=(0.0, 0.0),
        tray=scanner.Surface(albedo=1.0, specular=0.0, shininess=1.0),
        print_on_tray=_albedo(board, posed),
    )
    return replace(stack, calibration_digest=head.digest)


def _albedo(board: Board, posed: Calibration) -> NDArray[np.float32]:
    """Share of light that the plane returns, per camera pixel, averaged over its area [H, W]."""
    printed, scale = board.picture(_PX_PER_MM)
    paper = np.pad(printed, round(0.5 * board.square_mm * scale), constant_values=255)
    table = np.where(paper > 127, PAPER, INK).astype(np.float32)
    x, y = scanner.on_tray(posed)
    height, width = table.shape
    # texture pixel of a place on the plane; y of the print runs down
    u, v = x * scale + width / 2 - 0.5, -y * scale + height / 2 - 0.5
    u_across, u_down = np.gradient(u, axis=1), np.gradient(u, axis=0)
    v_across, v_down = np.gradient(v, axis=1), np.gradient(v, axis=0)
    total = np.zeros(u.shape, np.float32)
    steps = (np.arange(_SUBPIXELS) + 0.5) / _SUBPIXELS - 0.5
    for down in steps:
        for across in steps:
            total += cv2.remap(
                table,
                (u + across * u_across + down * u_down).astype(np.float32),
                (v + across * v_across + down * v_down).astype(np.float32),
                cv2.INTER_LINEAR,
                borderMode=cv2.BORDER_CONSTANT,
                borderValue=BENCH,
            )
    return (total / np.float32(_SUBPIXELS**2)).astype(np.float32)
