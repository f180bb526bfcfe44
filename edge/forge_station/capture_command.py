"""`forge-station capture`: a live view of scanner or camera in the terminal, recording, replay.

Shows what each scan is worth (valid, saturated, sharp), writes the latest picture, and records what
`inspect`, `calibrate` and the scanner driver `replay` read. It judges no part.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture import files, replay, session, structured_light
from forge_station.capture.base import Frame, PatternStack, Scan, Scanner, ScanSource, Trigger
from forge_station.capture.camera import CameraSettings
from forge_station.capture.replay import ReplayScanner
from forge_station.capture.supervisor import SupervisedCamera
from forge_station.config import load_station
from forge_station.errors import CaptureError, ConfigError, StationError
from forge_station.line import open_line

Source = Scanner | ScanSource
_PICTURE = Path("out/capture/latest.png")
_GRAB_S = 5.0

DESCRIPTION = """\
Look at what the scanner or a camera gives, scan by scan, without a model or a broker.

  --station FILE            its scanner: each scan is decoded, one line each
  --camera DRIVER[:ADDRESS] one camera, free running: one line a frame (opencv:/dev/video0,
                            aravis:192.168.7.20, replay:folder ...)
  --replay DIR              scans recorded before, in order; the same lines, the same digests

With --record DIR every scan goes to DIR/scan-000001 ... and every frame of a camera to DIR: as it
came, without loss, with times, calibration and digests. The latest picture is written to --picture
(grey image, and the height of each point in colour); a picture viewer that reloads shows it live.
"""
EPILOG = """\
A line says: valid, saturated, dark: shares of the image; points; blur: of the patterns' edges in
camera pixels; motion: pixels that something moved by; sharp: mean slope of the grey image (larger
is sharper; focus until it does not grow); digest: of the images, equal when they are replayed.
Ctrl-C ends it. The last line is one JSON object.

A recorded session is inspected as if it came from the scanner:
forge-station inspect DIR/scan-000001, or in a station file: scanner driver replay, folder DIR.

Exit code: 0; 2 when a scan failed; 64 wrong usage.

Examples:
  forge-station capture --station station.yaml --count 20 --record recordings/monday
  forge-station capture --replay recordings/monday
  forge-station capture --camera opencv:/dev/video0 --interval 0.5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--station", type=Path, metavar="FILE", help="the scanner of this station")
    source.add_argument("--camera", metavar="DRIVER[:ADDRESS]", help="one camera alone")
    source.add_argument("--replay", type=Path, metavar="DIR", help="recorded scans")
    parser.add_argument("--count", type=int, metavar="N", help="stop after N (default: Ctrl-C)")
    parser.add_argument(
        "--interval", type=float, default=0.0, metavar="S", help="pause between two (default 0)"
    )
    parser.add_argument("--part-number", metavar="ID", help="product of the scan (default: first)")
    parser.add_argument("--record", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--picture", type=Path, default=_PICTURE, metavar="FILE", help=f"default {_PICTURE}"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code. Raises StationError."""
    if args.count is not None and args.count < 1:
        raise ConfigError("--count", expected="1 or more", got=args.count)
    if args.record is not None and args.record.exists() and any(args.record.iterdir()):
        raise ConfigError(
            "there is something in the folder already", which=args.record, action="name a new one"
        )
    if args.camera is not None:
        return _camera(args)
    if args.replay is not None:
        source = _recorded(ReplayScanner(args.replay, "once"))
    else:
        source = _live(args)
    return _scans(args, source)


def _recorded(scanner: ReplayScanner) -> Iterator[tuple[Trigger, Source]]:
    """Every recorded scan once; a damaged one fails and the next follows."""
    for number in itertools.count(1):
        if scanner.finished:
            return
        yield Trigger(f"replay-{number:06d}"), scanner


def _live(args: argparse.Namespace) -> Iterator[tuple[Trigger, Source]]:
    """Triggers of the station, or of the product named, and the scanner set to them."""
    config = load_station(args.station)
    line = open_line(config)
    line.warm_up()
    for trigger in line.triggers(10**9):
        if args.part_number is not None:
            trigger = Trigger(trigger.serial, config.line.product(args.part_number).part_number)
        yield trigger, line.scanner_of(trigger)


def _scans(args: argparse.Namespace, source: Iterator[tuple[Trigger, Source]]) -> int:
    done = failed = 0
    began: float | None = None
    opened: dict[int, Source] = {}
    try:
        for number, (trigger, scanner) in enumerate(source, 1):
            opened[id(scanner)] = scanner
            start = time.monotonic()
            began = start if began is None else began
            try:
                stacks = scanner.capture(trigger)
                taken = time.monotonic() - start
                scans = _decoded(stacks, scanner)
            except StationError as error:
                failed += 1
                print(f"scan {number}: FAILED: {error}", flush=True)
                scans, taken = [], 0.0
            if scans:
                done += 1
                if args.record is not None:
                    _record(args.record / f"scan-{number:06d}", stacks, scanner)
                rate = done / max(time.monotonic() - began, 1e-9)
                print(f"scan {number}: {describe(scans)}, {taken:.2f} s, {rate:.2f}/s, digest "
                      f"{digest(stacks)[:12]}", flush=True)  # fmt: skip
                files.write_picture(args.picture, scan_picture(scans))
            if args.count is not None and number >= args.count:
                break
            time.sleep(args.interval)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        for scanner in opened.values():
            scanner.close()
    return _end(args, "scans", done, failed)


def _decoded(stacks: Sequence[PatternStack | Scan], scanner: Source) -> list[Scan]:
    """3D heads that measure by themselves give scans already."""
    patterns = [stack for stack in stacks if isinstance(stack, PatternStack)]
    ready = [stack for stack in stacks if isinstance(stack, Scan)]
    return ready + structured_light.decode_all(patterns, scanner.calibrations)


def _record(folder: Path, stacks: Sequence[PatternStack | Scan], scanner: Source) -> None:
    patterns = [stack for stack in stacks if isinstance(stack, PatternStack)]
    if len(patterns) != len(stacks):
        raise ConfigError(
            "a 3D head's scans are not recorded as pattern images",
            expected="a scanner of camera and projector",
            action="record its camera instead: --camera DRIVER:ADDRESS --record DIR",
        )
    replay.write(folder, patterns, scanner.calibrations)


def _camera(args: argparse.Namespace) -> int:
    driver, _, address = args.camera.partition(":")
    settings = CameraSettings(driver, address)
    recorder = session.Recorder(args.record) if args.record is not None else None
    done = failed = 0
    began = time.monotonic()
    with (
        closing(SupervisedCamera(settings)) as camera,
        closing(recorder) if recorder is not None else nullcontext(),
    ):
        info = camera.wait_open(settings.open_timeout_s + _GRAB_S)
        print(f"{info.driver} {info.vendor} {info.model} {info.serial}, {info.width}x{info.height}",
              file=sys.stderr)  # fmt: skip
        free = "free" in info.triggers
        camera.arm("free" if free else "software")
        try:
            for number in itertools.count(1):
                try:
                    if not free:
                        camera.trigger()
                    frame = camera.grab(_GRAB_S)
                except CaptureError as error:
                    failed += 1
                    print(f"frame {number}: FAILED: {error}", flush=True)
                    camera.wait_open(settings.open_timeout_s + _GRAB_S)
                    camera.arm("free" if free else "software")
                else:
                    done += 1
                    if recorder is not None:
                        recorder.write(frame)
                    rate = done / max(time.monotonic() - began, 1e-9)
                    print(f"frame {number}: {describe_frame(frame)}, {rate:.1f}/s", flush=True)
                    colour = frame.image.ndim == 3
                    files.write_picture(
                        args.picture, frame.image[..., ::-1] if colour else frame.image
                    )
                if args.count is not None and number >= args.count:
                    break
                time.sleep(args.interval)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return _end(args, "frames", done, failed)


def _end(args: argparse.Namespace, what: str, done: int, failed: int) -> int:
    recorded = None if args.record is None else str(args.record)
    print(json.dumps({what: done, "failed": failed, "recorded": recorded}))
    return 2 if failed or not done else 0


def describe(scans: Sequence[Scan]) -> str:
    """One scan of all heads on one line: shares averaged, the worst of blur and motion."""

    def mean(value: Callable[[Scan], float]) -> float:
        return float(np.mean([value(scan) for scan in scans]))

    points = sum(int(np.isfinite(scan.points[..., 2]).sum()) for scan in scans)
    words = [
        f"{len(scans)} pose{'s' * (len(scans) > 1)}",
        f"valid {mean(lambda s: s.quality.valid_share):.1%}",
        f"saturated {mean(lambda s: s.quality.saturated_share):.1%}",
        f"dark {mean(lambda s: s.quality.dark_share):.1%}",
        f"{points} points",
    ]
    for name in ("blur_px", "motion_px", "reprojection_px"):
        values = [getattr(scan.quality, name) for scan in scans]
        known = [value for value in values if value is not None]
        if known:
            words.append(f"{name.removesuffix('_px')} {max(known):.2f} px")
    words.append(f"sharp {mean(lambda s: sharpness(s.intensity)):.1f}")
    flags = dict.fromkeys(flag for scan in scans for flag in scan.quality.flags)
    return ", ".join(words + list(flags))


def describe_frame(frame: Frame) -> str:
    """One camera image on one line."""
    image = frame.image
    full = np.iinfo(image.dtype).max
    state = "" if frame.complete else "INCOMPLETE, "
    return (
        f"{state}number {frame.sequence}, {image.shape[1]}x{image.shape[0]} {frame.pixel_format}, "
        f"mean {image.mean() / full:.0%}, saturated {(image >= full).mean():.1%}, "
        f"sharp {sharpness(image):.1f}, sha256 {frame.sha256[:12]}"
    )


def sharpness(image: NDArray[np.uint8] | NDArray[np.uint16]) -> float:
    """Mean slope in grey levels of 255 a pixel: comparable for one scene, not between scenes."""
    grey = image if image.ndim == 2 else image.mean(axis=2)
    level = grey.astype(np.float32) * np.float32(255 / np.iinfo(image.dtype).max)
    across, down = cv2.Sobel(level, cv2.CV_32F, 1, 0), cv2.Sobel(level, cv2.CV_32F, 0, 1)
    return float(np.hypot(across, down).mean()) / 8


def digest(stacks: Sequence[Any]) -> str:
    """sha256 over the images (or points) of all poses, in order."""
    total = hashlib.sha256()
    for stack in stacks:
        values = stack.images if isinstance(stack, PatternStack) else stack.points
        total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


def scan_picture(scans: Sequence[Scan]) -> NDArray[np.uint8]:
    """A row a pose: the grey image, and height above the tray (or depth) in colour, BGR."""
    rows = []
    for scan in scans:
        grey = cv2.cvtColor(scan.intensity, cv2.COLOR_GRAY2BGR)
        z = scan.points[..., 2]
        seen = np.isfinite(z)
        low, high = np.percentile(z[seen], (1, 99)) if seen.any() else (0.0, 1.0)
        share = np.nan_to_num((z - low) / max(high - low, 1e-6), nan=0.0).clip(0, 1)
        colours = cv2.applyColorMap((share * 255).astype(np.uint8), cv2.COLORMAP_VIRIDIS)
        colours[~seen] = 0
        row = np.hstack([grey, colours])
        scale = min(1.0, 960 / row.shape[1])
        rows.append(cv2.resize(row, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA))
    widest = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))) for row in rows]
    return np.asarray(np.vstack(padded), np.uint8)
