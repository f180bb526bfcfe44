"""`forge-station inspect`: parts from files, one verdict each, without scanner and broker.

What stops one input becomes its ERROR verdict (intake.py); wrong usage, line file or bundle stop
the command before anything is inspected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from forge_station import evidence, intake, sources
from forge_station.config import load_line
from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome, worst
from forge_station.errors import ConfigError
from forge_station.geometry import forge_style, picture
from forge_station.opening import open_inspector
from forge_station.signing import public_key
from forge_station.sources import Options
from forge_station.vlm.engine import AUTO

EXIT_CODES: Mapping[Outcome, int] = {
    Outcome.PASS: 0,
    Outcome.FAIL: 1,
    Outcome.UNSURE: 2,
    Outcome.ERROR: 3,
}
_BUNDLE = Path("station_config/demo/bundle")
_OUT = Path("out/inspect")

DESCRIPTION = """\
Inspect parts from files: no scanner, no broker. One part an INPUT, one verdict a part.

INPUT is one of
  a recorded scan       folder with manifest.yaml (pattern images and calibrations)
  pattern images        folder of PNGs in projection order, with --calibration: a calibration of
                        this station (.yaml), or an OpenCV FileStorage file with --code-step and
                        --codes (Gray code and inverse in pairs, columns, rows, white, black)
  a cloud               .ply .pcd .npz .xyz .txt .csv .asc, organised or not, on a tray or bare
  a mesh                .obj .stl .ply with faces: laid on a virtual tray, scanned by the simulated
                        head and decoded (extra `demo`); --direct samples its surface instead
  three ready views     images named front, side and top (part-A_front.png ...), one part, one
                        scale: --mm-per-px
  a photo               any other image
Views and photos are read, but never judged: their outcome is UNSURE (NOT_CHECKED).
"""
EPILOG = """\
Without --line and --part-number a part is only read: UNSURE (NOT_CHECKED). PASS needs a bundle
with a certificate that a --trusted-key signed and that covers the product and this kind of scan
(simulated or real); otherwise what would be PASS is UNSURE (NO_CERTIFICATE, NOT_COVERED).

Standard output: one line of JSON a part, the verdict: outcome, reasons, parts (reading, probability
and size of each mark), surface, grids, scan (points, quality, source). The same goes to
OUT/NAME.verdict.json, and a picture for people to OUT/NAME.png.

Exit code: 0 PASS, 1 FAIL, 2 UNSURE, 3 ERROR (of several parts the worst: ERROR, FAIL, UNSURE,
PASS); 64 wrong usage, line file or bundle, nothing was inspected.

Examples:
  forge-station inspect bolt.stl
  forge-station inspect tray.ply --line station_config/demo/line.yaml --part-number KIT-M8
  forge-station inspect recordings/0007 --line line.yaml --part-number BOLT-M10x50 --out evidence
  forge-station inspect capture_0 --calibration calibration.xml --code-step 2 --codes 1024x768
  forge-station inspect nut_front.png nut_side.png nut_top.png --mm-per-px 0.05
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="see above")
    parser.add_argument(
        "--bundle", type=Path, default=_BUNDLE, metavar="DIR", help=f"model (default {_BUNDLE})"
    )
    parser.add_argument("--line", type=Path, metavar="FILE", help="line file with the products")
    parser.add_argument(
        "--forge-style", action="store_true", help="also write NAME.forge.png, as FORGE draws it"
    )
    parser.add_argument("--part-number", metavar="ID", help="the product of that line it should be")
    parser.add_argument(
        "--out", type=Path, default=_OUT, metavar="DIR", help=f"for the files (default {_OUT})"
    )
    scans = parser.add_argument_group("pattern images")
    scans.add_argument("--calibration", type=Path, metavar="FILE", help=".yaml, or OpenCV .xml")
    scans.add_argument(
        "--code-step", type=_whole, metavar="N", help="projector pixels a code (OpenCV file only)"
    )
    scans.add_argument(
        "--codes", type=_size, metavar="COLSxROWS", help="size of the code (OpenCV file only)"
    )
    clouds = parser.add_argument_group("clouds and meshes")
    clouds.add_argument(
        "--unit", choices=("auto", "mm", "m", "cm", "inch"), default="auto",
        help="of the file; auto: what it states, else metre if it is tiny, else mm",
    )  # fmt: skip
    clouds.add_argument(
        "--frame", choices=("auto", "tray", "part"), default="auto",
        help="of a cloud. tray: z = 0 is the tray; part: one bare part; auto: look for a tray",
    )  # fmt: skip
    clouds.add_argument(
        "--camera-pixel", type=_length, metavar="MM", help="of a cloud, if the file has it not"
    )
    clouds.add_argument(
        "--seed", type=_count, default=0, metavar="N", help="how a mesh comes to lie (default 0)"
    )
    clouds.add_argument(
        "--direct", action="store_true", help="sample a mesh's surface, do not scan it"
    )
    images = parser.add_argument_group("views and photos")
    images.add_argument("--mm-per-px", type=_length, metavar="MM", help="their scale")
    model = parser.add_argument_group("model")
    model.add_argument("--threads", type=_whole, default=2, metavar="N", help="default 2")
    model.add_argument(
        "--trusted-key", action="append", default=[], metavar="KEY",
        help="whose certificate of the bundle counts: PEM file or base64; may be given again. "
        "Without one no part is PASS",
    )  # fmt: skip
    model.add_argument("--provider", default=AUTO, help="ONNX Runtime provider (default auto)")


def run(args: argparse.Namespace) -> int:
    """Inspect all inputs; returns the exit code. Raises StationError before the first of them."""
    product, line = _product(args.line, args.part_number)
    options = Options(
        calibration=args.calibration,
        code_step=args.code_step,
        codes=args.codes,
        unit=args.unit,
        frame=args.frame,
        camera_pixel_mm=args.camera_pixel,
        mm_per_px=args.mm_per_px,
    )
    items = sources.items_of(args.inputs, options)
    _make_folder(args.out)
    request = intake.Request(options, product, line, args.seed, args.direct)
    outcomes = []
    inspector = open_inspector(
        args.bundle,
        threads=args.threads,
        provider=args.provider,
        trusted_keys=[public_key(text, Path()) for text in args.trusted_key],
    )
    print(inspector.permit.text, file=sys.stderr)
    with inspector.model:
        for item in items:
            found = intake.inspect(inspector, item, request)
            verdict = found.verdict
            outcomes.append(verdict.outcome)
            print(json.dumps(verdict.to_dict(), ensure_ascii=False, allow_nan=False), flush=True)
            if args.forge_style:
                _write_forge_style(args.out / f"{evidence.file_name(item.name)}.forge.png", found)
            png = evidence.picture_of(found.inspection, inspector.layout, ready=found.ready)
            stored = evidence.store_files(args.out, evidence.file_name(item.name), verdict, png)
            for warning in stored.warnings:
                print(f"forge-station: {warning}", file=sys.stderr)
            if stored.picture is not None:
                print(f"{item.name}: {verdict.outcome}, {stored.picture}", file=sys.stderr)
    return EXIT_CODES[worst(outcomes)]


def _write_forge_style(path: Path, found: intake.Found) -> None:
    """The parts as the FORGE benchmark draws them (one composite of three panels)."""
    parts = found.inspection.parts
    if not parts:
        print(f"forge-station: no part to draw in {path}", file=sys.stderr)
        return
    placed = [
        part.points @ part.tray_from_part[:3, :3].T + part.tray_from_part[:3, 3] for part in parts
    ]
    try:
        path.write_bytes(picture.encode(forge_style.composite(placed)))
    except OSError as error:
        print(f"forge-station: {path} not written: {error.strerror}", file=sys.stderr)


def _product(line: Path | None, part_number: str | None) -> tuple[Product | None, str]:
    if line is None:
        if part_number is not None:
            raise ConfigError(
                "a part number needs its line", expected="--line FILE", got="--part-number alone"
            )
        return None, ""
    spec = load_line(line)
    if part_number is None:
        known = ", ".join(product.part_number for product in spec.products)
        raise ConfigError(
            "a line without a part number", which=line, expected=f"--part-number, one of {known}"
        )
    return spec.product(part_number), spec.line


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the output folder cannot be made", which=f"--out {folder}", got=error.strerror
        ) from error


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def _length(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected millimetres, above 0")
    return number


def _size(text: str) -> tuple[int, int]:
    columns, _, rows = text.lower().partition("x")
    if not (columns.isdecimal() and rows.isdecimal() and 1 < int(columns) < 65537 > int(rows) > 1):
        raise argparse.ArgumentTypeError(f"{text!r}: expected COLUMNSxROWS, e.g. 1024x768")
    return int(columns), int(rows)
