"""The command `forge-station poses`: one calibrated head -> a calibration for each known pose."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from forge_station.capture import calibration_io, poses
from forge_station.capture.calibration import Calibration, Float
from forge_station.config import read_yaml
from forge_station.errors import ConfigError, InputError

_KEYS = ("calibrated_at", "flange_from_camera", "base_from_flange")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `forge-station poses`."""
    command.description = (
        "Write a calibration file for each pose of a head that was calibrated in one of them: on\n"
        "a turntable, or on a robot. Each file is a head of the station file.\n\n"
        "A robot file is YAML; matrices are four rows of four numbers, mm:\n"
        "  calibrated_at: home            # the pose in which the tray was calibrated\n"
        "  base_from_flange:              # as the controller reports them\n"
        "    home: [[1, 0, 0, 400], [0, -1, 0, 0], [0, 0, -1, 500], [0, 0, 0, 1]]\n"
        "    left: ...\n"
        "  flange_from_camera: ...        # from the drawing, or by capture.poses.hand_eye"
    )
    command.epilog = (
        "examples:\n"
        "  forge-station poses --calibration head.yaml --turntable 0 90 180 270 --out poses/\n"
        "  forge-station poses --calibration head.yaml --robot robot.yaml --out poses/"
    )
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    kind = command.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--turntable", type=float, nargs="+", metavar="DEG", help="angles of the table"
    )
    kind.add_argument("--robot", type=Path, metavar="FILE", help="robot poses, see above")
    command.add_argument(
        "--axis", type=float, nargs=3, default=[0.0, 0.0, 1.0], metavar=("X", "Y", "Z"),
        help="of the table in the tray frame (default 0 0 1)",
    )  # fmt: skip
    command.add_argument(
        "--point", type=float, nargs=3, default=[0.0, 0.0, 0.0], metavar=("X", "Y", "Z"),
        help="on that axis, mm (default 0 0 0)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files; the last line is one JSON object: file name -> digest."""
    head = calibration_io.load(args.calibration)
    if args.robot is not None:
        made = _on_robot(head, args.robot)
    else:
        made = poses.turntable(head, args.turntable, axis=args.axis, point_mm=args.point)
    if len({item.name for item in made}) != len(made):
        raise ConfigError("two poses are the same", got=", ".join(item.name for item in made))
    written = {}
    for item in made:
        path = args.out / f"{item.name}.yaml"
        if path.exists():
            raise InputError("the file exists already", which=path, action="pick another folder")
        calibration_io.save(item, path)
        written[path.name] = item.digest
        print(f"{path}: {item.name}, digest {item.digest[:16]}", file=sys.stderr)
    print(json.dumps(written))
    return 0


def _on_robot(head: Calibration, path: Path) -> list[Calibration]:
    raw = read_yaml(path)
    if not isinstance(raw, dict) or set(raw) != set(_KEYS):
        got = ", ".join(map(str, raw)) if isinstance(raw, dict) else "no mapping"
        raise ConfigError("robot poses", which=path, expected=", ".join(_KEYS), got=got)
    flanges = raw["base_from_flange"]
    if not isinstance(flanges, dict) or not flanges:
        raise ConfigError("robot poses", which=f"{path}: base_from_flange", expected="name: matrix")
    return poses.robot(
        head,
        {str(name): _matrix(value, f"{path}: {name}") for name, value in flanges.items()},
        calibrated_at=str(raw["calibrated_at"]),
        flange_from_camera=_matrix(raw["flange_from_camera"], f"{path}: flange_from_camera"),
    )


def _matrix(value: Any, where: str) -> Float:
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape != (4, 4):
        raise ConfigError("matrix of a pose", which=where, expected="four rows of four numbers")
    return found
