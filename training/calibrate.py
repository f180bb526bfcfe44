"""The operating point of a bundle: what it may promise, on which parts, and who says so.

    python -m training.calibrate keygen  --private .work/keys/line.pem --public line_key.pem
    python -m training.calibrate certify --rows rows.jsonl --bundle B --escape 0.01 \\
        --provenance simulated --key .work/keys/line.pem
    python -m training.calibrate sign    --certificate out/calibration/certificate.json \\
        --bundle B --key .work/keys/line.pem
    python -m training.calibrate pod     --rows rows.jsonl
    python -m training.calibrate suggest --bundle B --evidence FOLDER --labels labels.jsonl

`certify` (the word may be left out) divides the rows of `training.evaluate` by part: a fifth fits a
temperature a check, the rest carries the claim "escape <= E with confidence C". It refuses what the
parts cannot carry and says how many would. Written to --out: certificate.json (not signed yet),
report.json and three pictures; with --key it is signed into the bundle. `sign` puts it into a
bundle that was exported again with the same model files. A station that trusts the public key then
says PASS where it only advised. `suggest` finds limits of the surface check on labelled parts and
predicts overkill, escape and UNSURE on others of them; it claims nothing. training/CALIBRATION.md
explains all of it.

The last line is one JSON object of what was done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_station import private_key
from forge_station.contract import record
from forge_station.contract.certificate import CHANGES
from forge_station.errors import StationError
from forge_station.vlm.bundle_files import verify_folder
from training.calibration import keys, parts
from training.calibration.error import CalibrationError
from training.calibration.keys import write_whole
from training.evaluation import promised
from training.evaluation.promised import Promised
from training.evaluation.rows import read_rows

if TYPE_CHECKING:
    from training.calibration.certify import Certified

_OUT = Path("out/calibration")
_LEDGER = "looks.jsonl"
_UNUSED = ("cells", "cells_true", "cells_part", "marks", "probes", "exchanges")


def run_certify(args: argparse.Namespace) -> dict[str, Any]:
    """Certificate, report and pictures; signed into the bundle with --key."""
    from training.calibration.certify import Settings, certify
    from training.calibration.limits import Target

    manifest = verify_folder(args.bundle).manifest
    key = None if args.key is None else private_key.read(args.key)
    sizes = Promised() if args.promised is None else promised.read(args.promised)
    settings = Settings(
        target=Target(args.escape, args.confidence, args.overkill, args.together),
        ledger=args.ledger or args.rows.with_name(_LEDGER),
        provenance=args.provenance,
        fit_share=args.fit_share,
        least=args.least,
        repeats=args.repeats,
        promised=sizes.sizes,
        promised_unit=sizes.unit,
        label_protocol=args.labels,
        kappa=args.kappa,
        days=args.days,
        void_if=tuple(args.void_if),
    )
    fit_rows = None if args.fit is None else read_rows(args.fit, _UNUSED)
    now = datetime.now(timezone.utc)
    done = certify(read_rows(args.rows, _UNUSED), manifest, settings, now, fit_rows)
    written = write_certified(done, args.out)
    print(table(done))
    if key is not None:
        written.append(keys.put(keys.signed(done.certificate, key), args.bundle))
    return {
        "certificate": done.certificate.sha256,
        "text": done.certificate.text,
        "limit_pass": done.certificate.limit_pass,
        "limit_fail": done.certificate.limit_fail,
        "look": done.certificate.look,
        "signed": key is not None,
        "files": [str(path) for path in written],
    }


def write_certified(done: Certified, out: Path) -> list[Path]:
    """Certificate (not signed), report and pictures, into a folder; the files."""
    from training.calibration import plots

    report = {
        "certificate": record.write(done.certificate),
        "temperatures": record.write(dict(done.fits)),
        "left_out": dict(done.found.left_out),
        "parts": len(done.found.parts),
        "parts_that_fitted": len(done.fitted.parts),
    }
    certificate = json.dumps(record.write(done.certificate), indent=1, sort_keys=True)
    contents = {
        "certificate.json": f"{certificate}\n".encode(),
        "report.json": (json.dumps(report, indent=1) + "\n").encode(),
        "tradeoff.png": plots.tradeoff(done),
        "scores.png": plots.scores(done),
        "reliability.png": plots.reliability(done),
    }
    for name, content in contents.items():
        write_whole(out / name, content)
    return [out / name for name in contents]


def table(done: Certified) -> str:
    """What is claimed and what it costs, for people."""
    found = done.certificate
    lines = [
        f"certified: {found.text}, look {found.look}",
        f"PASS below {found.limit_pass:.3f}"
        + ("" if found.limit_fail is None else f", good parts stay below {found.limit_fail:.3f}"),
        "",
        f"{'claim for':<28}{'defective':>10}{'passed':>8}{'rank':>6}{'bound':>9}{'own limit':>11}",
    ]
    for claim in found.claims:
        lines.append(
            f"{', '.join(claim.checks):<28}{claim.defective:>10}{claim.escapes:>8}"
            f"{claim.rank:>6}{100 * claim.upper:>8.2f}%{claim.limit:>11.3f}"
        )
    lines += ["", f"{'of the good parts':<28}{'parts':>10}{'count':>8}{'share':>8}{'bound':>9}"]
    for name, one in (("FAIL (overkill)", found.overkill), ("UNSURE", found.unsure)):
        rate = one.count / one.parts if one.parts else 0.0
        lines.append(
            f"{name:<28}{one.parts:>10}{one.count:>8}{100 * rate:>7.1f}%{100 * one.upper:>8.1f}%"
        )
    lines.append("")
    for check, fit in done.fits.items():
        lines.append(f"temperature {check}: {fit.temperature:.3f} ({fit.parts} parts) {fit.note}")
    for why, count in sorted(done.found.left_out.items()):
        lines.append(f"left out: {count} ({why})")
    return "\n".join(lines)


def run_sign(args: argparse.Namespace) -> dict[str, Any]:
    """Sign a certificate that `certify` wrote and put it into a bundle."""
    signed = keys.signed(keys.read_draft(args.certificate), private_key.read(args.key))
    path = keys.put(signed, args.bundle)
    return {"file": str(path), "certificate": signed.certificate.sha256, "key_id": signed.key_id}


def run_keygen(args: argparse.Namespace) -> dict[str, Any]:
    """A new pair of keys."""
    public = private_key.generate(args.private, args.public)
    print(f"keep {args.private} to yourself; stations get {args.public} as trusted_keys")
    return {"private": str(args.private), "public": str(args.public), "key_id": public.id}


def run_pod(args: argparse.Namespace) -> dict[str, Any]:
    """The table, JSON and picture of detectable sizes."""
    from training.calibration import plots, pod

    data = pod.flaws(read_rows(args.rows, _UNUSED), args.unit, args.hit)
    curves = pod.curves(data)
    print(f"{'class':<14}{'flaws':>7}{'found':>7}{'a90':>9}{'a90/95':>9}  {args.unit}")
    for name, one in curves.items():
        if isinstance(one, pod.Refused):
            print(f"{name:<14}{one.flaws:>7}{one.hits:>7}{'-':>9}{'-':>9}  {one.reason}")
            continue
        bound = "none" if one.a90_95 is None else f"{one.a90_95:.3f}"
        print(f"{name:<14}{one.flaws:>7}{one.hits:>7}{one.a90:>9.3f}{bound:>9}")
    report = {
        "rows": str(args.rows),
        "unit": args.unit,
        "hit": args.hit,
        "curves": {name: record.write(one) for name, one in curves.items()},
    }
    stem = args.out / ("pod" if args.unit == "mm" else f"pod_{args.unit}")
    write_whole(stem.with_suffix(".json"), (json.dumps(report, indent=1) + "\n").encode())
    write_whole(stem.with_suffix(".png"), plots.pod(curves, data, args.unit))
    return {**report, "files": [f"{stem}.json", f"{stem}.png"]}


def run_suggest(args: argparse.Namespace) -> dict[str, Any]:
    """Table, JSON and picture of suggested limits, and a file for `export.bundle --thresholds`."""
    from forge_station.checks import Thresholds
    from training.calibration import stored, suggest
    from training.loop import labelled

    limits = Thresholds.read(verify_folder(args.bundle).manifest.thresholds)
    if args.rows is not None:
        rows, left_out = read_rows(args.rows, _UNUSED), {}
    elif args.evidence is not None and args.labels:
        found = labelled.read(args.evidence, args.labels)
        with stored.judge(args.bundle) as inspector:
            judged = stored.rows_of(found.told, inspector)
        rows, left_out = list(judged.rows), {**found.left_out, **judged.left_out}
    else:
        raise CalibrationError(
            "parts to choose with are missing", expected="--rows, or --evidence and --labels"
        )
    escape = args.escape
    if args.like is not None:
        escape = suggest.escape_of(read_rows(args.like, _UNUSED))
    done = suggest.suggest(rows, limits, escape=escape, overkill=args.overkill)
    print(suggest.table(done))
    report = {
        "thresholds": done.thresholds,
        "now": suggest.facts(done.now),
        "chosen_on": suggest.facts(done.chosen_on),
        "predicted": suggest.facts(done.predicted),
        "curve": [suggest.facts(one) for one in done.curve],
        "left_out": {**left_out, **done.left_out},
        "certificate": "none: limits that were suggested prove nothing, see certify",
    }
    stems = {"suggest.json": report, "thresholds.json": done.thresholds}
    for name, content in stems.items():
        write_whole(args.out / name, (json.dumps(content, indent=1) + "\n").encode())
    write_whole(args.out / "suggest.png", suggest.picture(done.curve, done.chosen_on, done.now))
    written = [str(args.out / name) for name in (*stems, "suggest.png")]
    return {**{k: v for k, v in report.items() if k != "curve"}, "files": written}


def build_parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    parser = argparse.ArgumentParser(
        prog="python -m training.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _certify_arguments(commands.add_parser("certify", help="rows -> certificate and pictures"))
    sign = commands.add_parser("sign", help="sign a certificate into a bundle")
    sign.add_argument("--certificate", type=Path, required=True, help="what certify wrote")
    sign.add_argument("--bundle", type=Path, required=True, help="bundle folder")
    sign.add_argument("--key", type=Path, required=True, help="private key (PEM)")
    sign.set_defaults(run=run_sign)
    keygen = commands.add_parser("keygen", help="a pair of Ed25519 keys")
    keygen.add_argument("--private", type=Path, required=True, help="file to write; keep it secret")
    keygen.add_argument("--public", type=Path, required=True, help="file to write, for stations")
    keygen.set_defaults(run=run_keygen)
    curve = commands.add_parser("pod", help="smallest defect that is found (a90, a90/95)")
    curve.add_argument("--rows", type=Path, required=True, help="rows of training.evaluate")
    curve.add_argument("--unit", choices=("mm", "px"), default="mm", help="px: camera pixels")
    curve.add_argument(
        "--hit",
        choices=("stopped", "failed"),
        default="stopped",
        help="what counts as found: the part does not pass, or it FAILs (default stopped)",
    )
    curve.add_argument("--out", type=Path, default=_OUT, help=f"folder (default {_OUT})")
    curve.set_defaults(run=run_pod)
    offer = commands.add_parser("suggest", help="limits of the surface check, and what they cost")
    offer.add_argument("--bundle", type=Path, required=True, help="whose limits are in question")
    offer.add_argument("--rows", type=Path, help="rows of training.evaluate --out")
    offer.add_argument("--evidence", type=Path, help="or: evidence folder of a station")
    offer.add_argument(
        "--labels", type=Path, nargs="+", help="with --evidence: labels (JSON lines)"
    )
    offer.add_argument(
        "--escape", type=_share, default=0.05, help="of the defective parts that pass, default 0.05"
    )
    offer.add_argument(
        "--like", type=Path, metavar="ROWS",
        help="rows of the bundle in use on the same parts: let through the share that it lets",
    )  # fmt: skip
    offer.add_argument(
        "--overkill", type=_share, default=0.02, help="of the good parts that FAIL, default 0.02"
    )
    offer.add_argument("--out", type=Path, default=_OUT, help=f"folder (default {_OUT})")
    offer.set_defaults(run=run_suggest)
    return parser


def _certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_certify)
    parser.add_argument("--rows", type=Path, required=True, help="rows of training.evaluate --out")
    parser.add_argument("--bundle", type=Path, required=True, help="the bundle that made them")
    claim = parser.add_argument_group("what is claimed")
    claim.add_argument("--escape", type=_share, default=0.01, help="P(PASS | defective), def. 0.01")
    claim.add_argument("--confidence", type=_share, default=0.95, help="default 0.95")
    claim.add_argument(
        "--overkill", type=_share, default=0.02, help="good parts above limit_fail, default 0.02"
    )
    claim.add_argument(
        "--together",
        action="store_true",
        help="one claim for the mix of checks in the rows; default: each check carries the claim "
        "by itself, so that it holds for any mix of products",
    )
    claim.add_argument(
        "--promised", type=Path, metavar="JSON", help="smallest defect per class in mm (pod.json)"
    )
    claim.add_argument("--days", type=int, default=180, help="how long it holds, default 180")
    claim.add_argument(
        "--void-if", nargs="*", choices=CHANGES, default=list(CHANGES), help="changes that void it"
    )
    origin = parser.add_argument_group("the parts")
    listed = "; ".join(f"{name}: {text}" for name, text in parts.PROVENANCE.items())
    origin.add_argument(
        "--provenance", choices=sorted(parts.PROVENANCE), help=f"of rows that tell none. {listed}"
    )
    origin.add_argument("--labels", default="", help="how the truth was found, in words")
    origin.add_argument("--kappa", type=float, help="agreement of two blind labellers")
    origin.add_argument("--repeats", choices=("refuse", "worst"), default="refuse")
    origin.add_argument(
        "--least", type=int, default=5, help="good and defective parts a workpiece, default 5"
    )
    origin.add_argument("--fit", type=Path, help="rows of other parts that fit the temperatures")
    origin.add_argument(
        "--fit-share", type=_share, default=0.2, help="without --fit: share that fits, default 0.2"
    )
    origin.add_argument(
        "--ledger", type=Path, help=f"of looks at these parts; default {_LEDGER} beside the rows"
    )
    parser.add_argument("--key", type=Path, help="private key: sign into the bundle at once")
    parser.add_argument("--out", type=Path, default=_OUT, help=f"folder (default {_OUT})")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, above 0 and below 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("--") and given[0] != "--help":
        given = ["certify", *given]
    args = build_parser().parse_args(given)
    command: Callable[[argparse.Namespace], dict[str, Any]] = args.run
    try:
        print(json.dumps(command(args)))
    except StationError as error:
        print(f"training.calibrate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
