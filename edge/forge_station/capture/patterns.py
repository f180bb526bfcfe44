"""The images that a projector shows, for every code that `structured_light` decodes. numpy only.

Which code fits a projector (`spec_for`), its images, their digest, and the command that writes them
for a projector that keeps them itself. Knows neither cameras nor projectors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture import calibration_io
from forge_station.capture.calibration import PatternSpec
from forge_station.capture.plausibility import refuse_bad_spec
from forge_station.errors import ConfigError, InputError

Code = Literal["phase", "columns", "columns+rows"]
_GREY = ".png"


def spec_for(
    code: Code,
    projector_size: tuple[int, int],
    *,
    period_px: float = 16.0,
    steps: int = 8,
    code_step: int = 1,
) -> PatternSpec:
    """The shortest sequence of a code that reaches over a projector of (width, height) pixels.

    phase: Gray code of the half period and phase shift, sub-pixel, columns. columns, columns+rows:
    integer Gray code with inverse pairs; rows make the reprojection error known. Raises
    CalibrationError where no sequence fits.
    """
    width, height = projector_size
    step = max(1, code_step)
    if code == "phase":
        spec = PatternSpec(
            period_px=period_px,
            steps=steps,
            column_bits=_bits(width, max(1.0, period_px / 2) * step),
            code_step=code_step,
        )
    else:
        both = code == "columns+rows"
        spec = PatternSpec(
            kind="gray_pairs",
            axis="both" if both else "column",
            period_px=0.0,
            steps=0,
            column_bits=_bits(width, step),
            row_bits=_bits(height, step) if both else 0,
            code_step=code_step,
        )
    refuse_bad_spec(spec, projector_size)
    return spec


def _bits(length: int, px_per_code: float) -> int:
    return max(1, math.ceil(math.log2(math.ceil(length / px_per_code))))


def profiles(
    spec: PatternSpec, projector_size: tuple[int, int]
) -> list[tuple[int, NDArray[np.float64]]]:
    """One (axis, intensity 0..1 along that axis) per image.

    Axis 0 varies with the column, 1 with the row.
    """
    refuse_bad_spec(spec, projector_size)
    width, height = projector_size
    x = np.arange(width)
    white, black = (0, np.ones(width)), (0, np.zeros(width))
    again = [white] if spec.white_last else []
    if spec.kind == "gray_phase":
        column = x // spec.code_step
        index = (column // (spec.period_px / 2)).astype(np.int64)
        gray = index ^ (index >> 1)
        bits = [(0, ((gray >> b) & 1).astype(float)) for b in reversed(range(spec.column_bits))]
        phase = 2 * np.pi * (column + 0.5) / spec.period_px
        shifts = [
            (0, 0.5 + 0.5 * np.cos(phase - 2 * np.pi * k / spec.steps)) for k in range(spec.steps)
        ]
        return [white, black, *bits, *shifts, *again]
    images: list[tuple[int, NDArray[np.float64]]] = []
    for axis, length, bit_count in ((0, width, spec.column_bits), (1, height, spec.row_bits)):
        code = np.arange(length) // spec.code_step
        gray = code ^ (code >> 1)
        for b in reversed(range(bit_count)):
            bit = ((gray >> b) & 1).astype(float)
            images += [(axis, bit), (axis, 1 - bit)]
    return [*images, white, black, *again]


def images(spec: PatternSpec, projector_size: tuple[int, int]) -> NDArray[np.uint8]:
    """Images for the projector, uint8 [N, height, width].

    Linear in light: the projector must not apply a gamma.
    """
    width, height = projector_size
    out = np.empty((spec.image_count, height, width), np.uint8)
    for image, (axis, profile) in zip(out, profiles(spec, projector_size), strict=True):
        values = np.round(profile * 255).astype(np.uint8)
        image[:] = values[None, :] if axis == 0 else values[:, None]
    return out


def digest(shown: NDArray[np.uint8]) -> str:
    """sha256 of images [N, height, width] with their shape: says which patterns a device keeps."""
    head = "x".join(map(str, shown.shape)).encode()
    return hashlib.sha256(head + np.ascontiguousarray(shown).tobytes()).hexdigest()


def write(shown: NDArray[np.uint8], folder: Path) -> None:
    """8-bit grey PNG files pattern_00.png ... in a folder that is new or empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError("the folder for the patterns is not empty", which=folder)
        for number, image in enumerate(shown):
            ok, data = cv2.imencode(_GREY, image)
            if not ok:
                raise InputError("a pattern cannot be written as PNG", which=number)
            path = folder / f"pattern_{number:02d}{_GREY}"
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(data.tobytes())
            fresh.replace(path)
    except OSError as error:
        raise InputError(
            "the patterns cannot be written", which=error.filename or folder, got=error.strerror
        ) from error


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `forge-station patterns`."""
    command.description = (
        "Write the pattern images of a code as PNG files, for a projector that keeps them itself\n"
        "(driver `stored`) or to look at. Take --calibration for a head that is calibrated: its\n"
        "patterns must be the ones it was calibrated with.\n\n"
        "The last line of the output is one JSON object with the options for the station file."
    )
    command.epilog = (
        "examples:\n"
        "  forge-station patterns --projector 912x570 --out patterns/\n"
        "  forge-station patterns --projector 1920x1080 --code columns+rows --out patterns/\n"
        "  forge-station patterns --calibration head.yaml --out patterns/"
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--calibration", type=Path, metavar="FILE", help="the head's calibration")
    source.add_argument("--projector", metavar="WxH", help="native resolution, e.g. 912x570")
    command.add_argument(
        "--code",
        choices=["phase", "columns", "columns+rows"],
        default="phase",
        help="phase: sub-pixel, the usual choice; columns(+rows): integer Gray code in inverse "
        "pairs, for projectors that cannot show greys (default phase)",
    )
    command.add_argument("--period", type=float, default=16.0, metavar="PX", help="default 16")
    command.add_argument("--steps", type=int, default=8, metavar="N", help="phase steps, default 8")
    command.add_argument(
        "--code-step", type=int, default=1, metavar="N", help="projector pixels a code, default 1"
    )
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command `forge-station patterns`."""
    if args.calibration is not None:
        calibration = calibration_io.load(args.calibration)
        spec, size = calibration.pattern, calibration.projector.image_size
    else:
        size = _size(args.projector)
        spec = spec_for(
            args.code, size, period_px=args.period, steps=args.steps, code_step=args.code_step
        )
    shown = images(spec, size)
    write(shown, args.out)
    print(
        f"{len(shown)} patterns {size[0]}x{size[1]} in {args.out} ({spec.kind}, "
        f"{spec.column_bits} column bits, {spec.row_bits} row bits, code step {spec.code_step})",
        file=sys.stderr,
    )
    options = {"width": size[0], "height": size[1], "patterns": len(shown)}
    print(json.dumps({**options, "sha256": digest(shown)}))
    return 0


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise ConfigError("size of the projector", expected="WIDTHxHEIGHT in pixels", got=text)
    if max(int(width), int(height)) > 8192:
        raise ConfigError("size of the projector", expected="8192 pixels at most", got=text)
    return int(width), int(height)
