"""`forge-station calibrate`: a head's calibration from board poses, its check, the tray, the board.

Parses, asks for the poses, prints, writes files. The arithmetic is in `capture.calibrate`, what the
figures mean in `capture.calibrate_report`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from forge_station import calibrate_poses
from forge_station.calibrate_poses import Pose, Size
from forge_station.capture import calibrate, calibration_io, files, patterns
from forge_station.capture import calibrate_report as report
from forge_station.capture.base import Scanner
from forge_station.capture.board import Board
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.config import DepthScanner, load_station
from forge_station.errors import CalibrationError, CaptureError, ConfigError
from forge_station.line import open_line

EXIT_CODES = {"pass": 0, "warn": 1, "fail": 2}
_OUT = Path("out/calibration/head.yaml")
_PRACTICE_POSES = 16
_PRACTICE_SIZE = (640, 480)

DESCRIPTION = """\
Calibrate a scan head (camera and projector) from a board held in 12 or more poses.

  1  print a board                        --board board.pdf
  2  let the head scan with a calibration that is only nominal, and code columns and rows
                                          --nominal FILE --camera WxH --projector WxH
  3  hold the board in 12 or more poses   --station FILE (guided), or a FOLDER of recorded scans
  4  lay the board on the tray            --tray --calibration FILE
  5  every week, or after a knock         --check --calibration FILE

POSES is a folder of scans recorded by `forge-station capture --record`, or of sub-folders of
pattern images (Gray code and inverse in pairs, columns, rows, white, black) with --projector.
docs/CALIBRATION.md tells how to do it in an hour, and what the figures mean.
"""
EPILOG = """\
The calibration is written to --out, and a picture of coverage and residuals next to it (.png). A
calibration that is not good enough is not written, except with --accept, which is noted in it.
The last line of the output is one JSON object.

Exit code: 0 good, 1 usable with warnings, 2 not good enough (--check: drifted), 64 wrong usage.

Examples:
  forge-station calibrate --practice                         a simulated head and board, to try it
  forge-station calibrate --practice --nominal sim.yaml      of the camera driver `sim`, complete
  forge-station calibrate --board board.pdf --squares 11x8 --square 12 --marker 9
  forge-station calibrate --station station.yaml --out head.yaml
  forge-station calibrate poses/ --without pose07 --out head.yaml
  forge-station calibrate --tray --station station.yaml --calibration head.yaml --thickness 3.2
  forge-station calibrate --check scan/ --calibration head.yaml
  forge-station calibrate --export head.xml --calibration head.yaml
  forge-station calibrate --import old.xml --code-step 2 --codes 1024x768 --out head.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.usage = "%(prog)s [POSES | --station FILE | --practice] [what to do] [options]"
    parser.add_argument("poses", nargs="?", type=Path, metavar="POSES", help="see above")
    task = parser.add_argument_group(
        "what to do (default: calibrate)"
    ).add_mutually_exclusive_group()
    task.add_argument("--check", action="store_true", help="drift of --calibration, on a board")
    task.add_argument("--tray", action="store_true", help="find the tray: a board lies on it")
    task.add_argument(
        "--board", type=Path, metavar="FILE", help="write a board to print, pdf or png"
    )
    task.add_argument("--nominal", type=Path, metavar="FILE", help="write a nominal calibration")
    task.add_argument(
        "--export", type=Path, metavar="FILE", help="write OpenCV .xml, .yml or .json"
    )
    task.add_argument(
        "--import", type=Path, metavar="FILE", dest="foreign", help="read such a file"
    )
    source = parser.add_argument_group("where poses come from, instead of POSES")
    source.add_argument("--station", type=Path, metavar="FILE", help="its scanner, pose by pose")
    source.add_argument("--practice", action="store_true", help="a simulated head (extra `demo`)")
    source.add_argument("--head", metavar="NAME", help="which one, of a scanner with several")
    source.add_argument("--without", action="append", default=[], metavar="POSE", help="leave out")
    board = parser.add_argument_group("board (default: the calibration's, else 11x8, 12, 9 mm)")
    board.add_argument("--squares", type=_size, metavar="COLSxROWS", help="all squares")
    board.add_argument("--square", type=float, metavar="MM", help="side, measured on the print")
    board.add_argument("--marker", type=float, metavar="MM", help="side of a ChArUco marker")
    board.add_argument("--dictionary", metavar="NAME", help="OpenCV's name, e.g. DICT_5X5_100")
    board.add_argument("--legacy", action="store_true", help="ChArUco layout before OpenCV 4.6")
    board.add_argument("--chessboard", action="store_true", help="without markers; wholly in view")
    head = parser.add_argument_group("head")
    head.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of --check, --tray, --export"
    )
    head.add_argument("--camera", type=_size, metavar="WxH", help="pixels (--nominal)")
    head.add_argument("--projector", type=_size, metavar="WxH", help="pixels of the projector")
    head.add_argument("--codes", type=_size, metavar="COLSxROWS", help="of the code (--import)")
    head.add_argument("--code-step", type=int, default=1, metavar="N", help="pixels a code")
    head.add_argument(
        "--code", choices=("phase", "columns", "columns+rows", "same"),
        help="of the scans to come (default phase); same: that of the poses. --nominal: of the "
        "poses (default columns+rows)",
    )  # fmt: skip
    head.add_argument("--k3", action="store_true", help="fit k3 too: very wide lenses only")
    head.add_argument("--thickness", type=float, default=0.0, metavar="MM", help="board (--tray)")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="FILE", help=f"default {_OUT}")
    parser.add_argument("--accept", action="store_true", help="write it in spite of the verdict")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code. Raises StationError."""
    if args.board is not None:
        board = _board(args, None)
        print(
            f"{args.board}: {board.write(args.board)}, {board}; print at 100 %, measure the ruler"
        )
        return 0
    if args.nominal is not None:
        return _write_nominal(args)
    if args.export is not None:
        calibration_io.export_opencv(_calibration(args), args.export)
        print(f"{args.export}: principal points in OpenCV's convention (centre of pixel 0 is 0)")
        return 0
    if args.foreign is not None:
        return _import(args)
    if args.check:
        return _check(args)
    if args.tray:
        return _tray(args)
    return _calibrate(args)


def _write_nominal(args: argparse.Namespace) -> int:
    if args.practice:
        import forge_station.capture.sim  # noqa: F401  says which extra is missing
        from forge_station.sim import scanner

        simulated = scanner.rig(1.0, "overhead", args.camera or _PRACTICE_SIZE)[0]
        calibration_io.save(simulated, args.nominal)
        print(f"{args.nominal}: of the camera driver `sim`, with its tray; docs/CAMERAS.md")
        return 0
    if args.camera is None or args.projector is None:
        raise ConfigError("--nominal needs the sizes", expected="--camera WxH and --projector WxH")
    code: patterns.Code = "columns+rows" if args.code in (None, "same") else args.code
    found = calibrate_poses.nominal(args.camera, args.projector, code, args.code_step)
    calibration_io.save(found, args.nominal)
    print(f"{args.nominal}: for recording poses only; {found.pattern.image_count} patterns, {code}")
    return 0


def _import(args: argparse.Namespace) -> int:
    if args.codes is None:
        raise ConfigError(
            "an OpenCV calibration does not tell the projected code",
            which=args.foreign,
            expected="--codes COLUMNSxROWS, and --code-step where a code is more than one pixel",
        )
    found = calibration_io.import_opencv(
        args.foreign, code_step=args.code_step, pattern_size=args.codes
    )
    calibration_io.save(found, args.out)
    print(f"{args.out}: {found.name}, rms {found.rms_px:.3f} px; check it with --check on a board")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    board = _board(args, None)
    views, heads = _views(args, board)
    if not views:
        raise CalibrationError("no pose of the board was usable", expected="12 or more")
    first = heads[0]
    solution = calibrate.solve(
        views,
        board,
        first.camera.image_size,
        first.projector.image_size,
        sixth_order=args.k3,
    )
    spec = _pattern(args, first)
    notes = {
        "board": str(board),
        "date": calibrate_poses.dated(),
        "poses": str(len(views)),
        "camera_rms_px": f"{solution.camera_rms_px:.4f}",
        "projector_rms_px": f"{solution.projector_rms_px:.4f}",
    }
    found = solution.calibration(args.out.stem, spec, notes)
    findings = report.judge(solution, views, [calibrate.measure(v, board, found) for v in views])
    level = report.worst(findings)
    print(f"\n{report.table(solution)}\n")
    _print(findings)
    words = {"pass": "GOOD", "warn": "USABLE, with warnings", "fail": "NOT GOOD ENOUGH"}[level]
    picture = args.out.with_suffix(".png")
    title = f"{words}: {len(views)} poses, both together rms {solution.stereo_rms_px:.3f} px"
    files.write_picture(picture, report.draw(solution, views, title), compression=9)
    written = level != "fail" or args.accept
    if written:
        verdict = {**notes, "verdict": words}
        calibration_io.save(replace(found, notes=verdict), args.out)
    print(f"\n{words}. Picture: {picture}")
    if written:
        print(f"Calibration: {args.out} ({spec.kind}, code step {spec.code_step}). Next: --tray")
    else:
        print("Nothing was written. Do what the lines above say, or --accept.")
    result = {
        "verdict": level,
        "poses": len(views),
        "camera_rms_px": round(solution.camera_rms_px, 4),
        "projector_rms_px": round(solution.projector_rms_px, 4),
        "stereo_rms_px": round(solution.stereo_rms_px, 4),
        "outliers": list(calibrate.outliers(solution.poses)),
        "file": str(args.out) if written else None,
        "digest": found.digest if written else None,
    }
    print(json.dumps(result))
    return EXIT_CODES[level]


def _check(args: argparse.Namespace) -> int:
    """Every pose given is checked; the worst decides."""
    results, levels = [], []
    for stack, own in _poses(args, _board(args, _given(args))):
        calibration = _given(args) or own
        board = _board(args, calibration)
        fit = calibrate.measure(calibrate.look(stack, board), board, calibration)
        findings = report.drift(fit)
        print(f"{stack.name or 'scan'} against {calibration.name} ({calibration.digest[:12]})")
        _print(findings)
        levels.append(report.worst(findings))
        results.append({"pose": stack.name, "verdict": levels[-1], **_figures(fit)})
    level = max(levels, key=list(EXIT_CODES).index, default="fail")
    print(f"\n{'OK' if level == 'pass' else 'DRIFTED' if level == 'fail' else 'OK, with warnings'}")
    print(json.dumps({"verdict": level, "poses": results}))
    return EXIT_CODES[level]


def _tray(args: argparse.Namespace) -> int:
    """One file a stack: a turntable has as many poses as its trigger gives stacks."""
    calibration = _calibration(args)
    board = _board(args, calibration)
    if board.kind == "chessboard":
        raise ConfigError(
            "a chessboard looks alike when it is turned round",
            expected="a ChArUco board on the tray",
            action="print one with --board",
        )
    found = []
    for stack, _ in _poses(args, board):
        fit = calibrate.measure(calibrate.look(stack, board), board, calibration)
        findings = report.drift(fit)
        print(stack.name or "scan")
        _print(findings)
        if report.worst(findings) == "fail" and not args.accept:
            raise CalibrationError(
                "the tray was not found",
                which=stack.name,
                expected="a board that the head measures right",
                action="see the lines above; calibrate the head first",
            )
        pose = calibrate.tray(fit, board, args.thickness)
        found.append((stack.name, replace(calibration, tray_from_camera=pose)))
    files = []
    for name, result in found:
        path = args.out if len(found) == 1 else args.out.with_name(f"{args.out.stem}-{name}.yaml")
        calibration_io.save(replace(result, name=path.stem), path)
        print(f"{path}: tray {result.range_mm or 0:.1f} mm from the camera along its axis")
        files.append(str(path))
    print(json.dumps({"files": files}))
    return 0


def _views(
    args: argparse.Namespace, board: Board
) -> tuple[list[calibrate.View], list[Calibration]]:
    """The usable poses; each is told as it comes, unusable ones with the reason."""
    views: list[calibrate.View] = []
    kept: list[Pose] = []
    for stack, head in _poses(args, board):
        if stack.name in args.without:
            print(f"{stack.name}: left out")
            continue
        try:
            view = calibrate.look(stack, board)
        except CaptureError as error:
            print(f"{stack.name}: not used: {error}")
            continue
        views.append(view)
        kept.append((stack, head))
        calibrate_poses.refuse_other_head(kept)
        kept = kept[:1]  # one is enough to compare with; images of all poses would fill the memory
        told = report.progress(views, board, head.camera.image_size)
        print(f"{stack.name}: {told}", flush=True)
    return views, [head for _, head in kept]


def _poses(args: argparse.Namespace, board: Board) -> Iterator[Pose]:
    given = [args.poses is not None, args.station is not None, args.practice]
    if sum(given) != 1:
        raise ConfigError(
            "where do the poses come from?",
            expected="one of POSES (a folder), --station FILE, --practice",
            got=f"{sum(given)} of them",
        )
    if args.poses is not None:
        yield from calibrate_poses.recorded(args.poses, args.projector, args.code_step)
    elif args.practice:
        yield from _practice(args, board)
    else:
        config = load_station(args.station)
        if isinstance(config.scanner, DepthScanner):
            raise ConfigError(
                "3D heads are calibrated by their makers",
                which=args.station,
                expected="a scanner of camera and projector (driver: head)",
            )
        part_number = config.line.products[0].part_number
        line = open_line(config)
        scanner = cast("Scanner", line.scanner_of(calibrate_poses.trigger(part_number, 0)))
        record = args.out.parent / "poses"
        print(f"Every pose is recorded in {record}", file=sys.stderr)
        yield from calibrate_poses.live(scanner, part_number, record, args.head)


def _practice(args: argparse.Namespace, board: Board) -> Iterator[Pose]:
    from forge_station.capture.sim import SimulatedBoard
    from forge_station.sim import scanner

    spec = patterns.spec_for("columns+rows", scanner.PROJECTOR_SIZE)
    size = args.camera or _PRACTICE_SIZE
    head = scanner.rig(1.0, "overhead", size, pattern=spec)[0]
    practice = SimulatedBoard(head, board, 1 if args.check or args.tray else _PRACTICE_POSES)
    for number in range(1 if args.check or args.tray else _PRACTICE_POSES):
        for stack in practice.capture(calibrate_poses.trigger("", number + 1)):
            yield stack, practice.nominal


def _board(args: argparse.Namespace, calibration: Calibration | None) -> Board:
    """As given; what is not given is as in the calibration's notes, else the default."""
    text = "" if calibration is None else calibration.notes.get("board", "")
    base = Board.parse(text) if text else Board()
    changed: dict[str, Any] = {
        name: value
        for name, value in (
            ("squares", args.squares),
            ("square_mm", args.square),
            ("marker_mm", args.marker),
            ("dictionary", args.dictionary),
        )
        if value is not None
    }
    if args.square is not None and args.marker is None:
        changed["marker_mm"] = args.square * base.marker_mm / base.square_mm
    if args.chessboard:
        changed["kind"] = "chessboard"
    if args.legacy:
        changed["legacy"] = True
    return replace(base, **changed)


def _given(args: argparse.Namespace) -> Calibration | None:
    return None if args.calibration is None else calibration_io.load(args.calibration)


def _calibration(args: argparse.Namespace) -> Calibration:
    found = _given(args)
    if found is None:
        raise ConfigError("no calibration given", expected="--calibration FILE")
    return found


def _pattern(args: argparse.Namespace, head: Calibration) -> PatternSpec:
    if args.code == "same":
        return head.pattern
    code: patterns.Code = args.code or "phase"
    return patterns.spec_for(code, head.projector.image_size, code_step=args.code_step)


def _print(findings: list[report.Finding]) -> None:
    for finding in findings:
        print(f"  {finding}")


def _figures(fit: calibrate.BoardFit) -> dict[str, float]:
    return {
        "camera_px": round(fit.camera_px, 4),
        "projector_px": round(fit.projector_px, 4),
        "scale_error": round(fit.scale_error, 6),
        "plane_mm": round(fit.plane_mm, 4),
        "distance_mm": round(fit.distance_mm, 2),
    }


def _size(text: str) -> Size:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"expected two numbers like 11x8, got {text!r}")
    return int(width), int(height)
