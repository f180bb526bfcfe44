"""Where the poses of a board come from: recorded scans, plain pattern images, a live scanner.

Each pose is a pattern stack and the (perhaps only nominal) calibration that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from forge_station.capture import patterns, replay
from forge_station.capture.base import PatternStack, Scanner, ScanSource, Trigger
from forge_station.capture.calibration import Calibration, Optics
from forge_station.errors import CaptureError, ConfigError, InputError, StationError
from forge_station.mes.stamp import utc_now

Pose = tuple[PatternStack, Calibration]
Size = tuple[int, int]


def nominal(camera: Size, projector: Size, code: patterns.Code, code_step: int = 1) -> Calibration:
    """What is known of a head before it is calibrated: sizes, pattern; the lenses are guessed."""
    lenses = []
    for width, height in (camera, projector):
        focal, centre = 1.4 * width, ((width - 1) / 2, (height - 1) / 2)
        matrix = np.array([[focal, 0, centre[0]], [0, focal, centre[1]], [0, 0, 1.0]])
        lenses.append(Optics((width, height), matrix))
    aside = np.eye(4)
    aside[0, 3] = -100.0
    return Calibration(
        name="nominal",
        camera=lenses[0],
        projector=lenses[1],
        projector_from_camera=aside,
        tray_from_camera=None,
        pattern=patterns.spec_for(code, projector, code_step=code_step),
        notes={"source": "guessed, not calibrated: for recording the poses of a board only"},
    )


def recorded(folder: Path, projector: Size | None, code_step: int) -> Iterator[Pose]:
    """The poses of a folder, in name order.

    Either scans with a manifest (the folder itself, or its sub-folders), or sub-folders of pattern
    images (or the folder itself), which need the projector's size. Raises InputError.
    """
    if not folder.is_dir():
        raise InputError("no such folder of poses", which=folder)
    inside = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    scans = [path for path in inside if (path / replay.MANIFEST).is_file()]
    if scans:
        for scan in scans:
            recording = replay.read(scan)
            for stack in recording.stacks:
                several = len(recording.stacks) > 1
                name = scan.name if not several else f"{scan.name}-{stack.name}"
                yield replace(stack, name=name), recording.calibrations[stack.calibration_digest]
        return
    loose = [path for path in inside if any(path.glob("*.png"))]
    if not loose:
        raise InputError(
            "no poses in the folder",
            which=folder,
            expected=f"sub-folders with {replay.MANIFEST}, or with pattern images (PNG)",
        )
    if projector is None:
        raise ConfigError(
            "pattern images without the size of the projector",
            which=folder,
            expected="--projector WIDTHxHEIGHT, and --code-step where it is not 1",
        )
    for path in loose:
        images = sorted(path.glob("*.png"))
        first = cv2.imread(str(images[0]), cv2.IMREAD_GRAYSCALE)
        if first is None:
            raise InputError("damaged image", which=images[0])
        size = (first.shape[1], first.shape[0])
        head = nominal(size, projector, "columns+rows", code_step)
        yield replay.read_images(images, head, name=path.name), head


def live(
    scanner: Scanner | ScanSource,
    part_number: str,
    record: Path,
    head: str | None,
    ask: Callable[[str], str] = input,
) -> Iterator[Pose]:
    """Scan pose after pose as the person at the terminal says; every pose is recorded at once.

    `head`: name of the stack that counts, where a trigger gives stacks of several heads.
    """
    with closing(scanner):
        number = 0
        while True:
            try:
                answer = ask(f"pose {number + 1}: place the board, Enter to scan, d when done: ")
            except EOFError:
                return
            if answer.strip().lower().startswith("d"):
                return
            try:
                stacks = _of_one_head(scanner, part_number, number + 1, head)
            except CaptureError as error:
                print(f"  not scanned: {error}", file=sys.stderr)
                continue
            number += 1
            for stack in stacks:
                name = f"pose{number:02d}" + (f"-{stack.name}" if len(stacks) > 1 else "")
                named = replace(stack, name=name)
                replay.write(record / name, [named], scanner.calibrations)
                yield named, scanner.calibrations[stack.calibration_digest]


def trigger(part_number: str, number: int) -> Trigger:
    """The trigger of a pose."""
    return Trigger(f"calibrate-{number:02d}", part_number)


def _of_one_head(
    scanner: Scanner | ScanSource, part_number: str, number: int, head: str | None
) -> list[PatternStack]:
    given = scanner.capture(trigger(part_number, number))
    stacks = [stack for stack in given if isinstance(stack, PatternStack)]
    if len(stacks) != len(given):
        raise ConfigError(
            "this head measures by itself; its maker calibrates it",
            expected="a head of camera and projector",
        )
    if head is not None:
        named = [stack for stack in stacks if stack.name == head]
        if not named:
            raise ConfigError(
                "no such head", which=head, expected=", ".join(s.name for s in stacks)
            )
        return named
    found = [scanner.calibrations[stack.calibration_digest] for stack in stacks]
    if any((c.camera, c.projector) != (found[0].camera, found[0].projector) for c in found):
        raise ConfigError(
            "the scanner has several heads; they are calibrated one by one",
            expected=f"--head {' or '.join(stack.name for stack in stacks)}",
        )
    return stacks


def refuse_other_head(poses: list[Pose]) -> None:
    """All poses must be of one head. Raises StationError naming the odd one."""
    first = poses[0][1]
    for stack, head in poses:
        sizes = (head.camera.image_size, head.projector.image_size)
        if sizes != (first.camera.image_size, first.projector.image_size):
            raise StationError(
                "poses of different heads",
                which=stack.name,
                expected=f"images {first.camera.image_size}, projector "
                f"{first.projector.image_size}",
                got=f"{sizes[0]}, {sizes[1]}",
            )


def dated() -> str:
    """Today, UTC."""
    return utc_now()[:10]
