"""A bundle for another line from one that exists: its graphs, the other line's rules and parts.

    python -m export.reline --bundle station_config/demo/bundle --line line.yaml --out bolts \\
        --name bolts --release 1 --golden cases

The model names parts of the whole catalogue, and a line file says which of them are right. So a
line whose parts are in the catalogue needs no training and no checkpoint, and nothing here needs
torch. The graphs stay as they are, byte for byte. A certificate holds for the model files
and the workpieces that it names, so it comes along as long as both are still true: references of
other parts (--references) make other model files, and void it (training/CALIBRATION.md).

How well the model reads the new line's parts is not known by this: measure it
(`training.evaluate`), and train where it is not enough. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from export import golden as golden_set
from export import model_card
from export.bundle import LINE, check_line, check_references, entry_of
from export.release import CARD
from forge_station.contract.certificate import CERTIFICATE_NAME
from forge_station.contract.error import StationError
from forge_station.contract.manifest import GOLDEN, MANIFEST_NAME, FileEntry, Manifest
from forge_station.contract.seal import SEAL_NAME
from forge_station.errors import InputError
from forge_station.geometry import reference_io
from forge_station.vlm.bundle_files import verify_folder
from forge_station.vlm.model import TOKENIZER
from forge_station.vlm.text import TextCodec

_MADE_ANEW = (LINE, CARD, *GOLDEN)


@dataclass(frozen=True)
class Relined:
    """What a person decides about the new bundle."""

    line: Path
    name: str
    version: str = "0.1.0"
    release_counter: int = 1
    references: Path | None = None
    """References of the line's parts in place of the bundle's; they void its certificate."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Operating points in place of the bundle's; they void its certificate."""


def reline(
    source: Path,
    out: Path,
    wanted: Relined,
    golden: Callable[[Path], object] | None = None,
) -> tuple[Manifest, bool]:
    """Write the bundle folder `out`, whole or not at all, and say whether the certificate came
    along. Raises StationError; the bundle at `source` is verified and stays as it is."""
    if out.exists():
        raise InputError("output folder exists", which=out, action="choose another one")
    found = verify_folder(source)
    codec = TextCodec.open(source / TOKENIZER)
    line, inspected = check_line(wanted.line, codec)
    card = dict(found.manifest.training)
    references = wanted.references
    if references is None and reference_io.FILE in found.manifest.files:
        references = source / reference_io.FILE
    check_references(references, card, inspected)
    draft = out.with_name(f"{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for name in found.manifest.files:
            if name not in _MADE_ANEW:
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, draft / name)
        shutil.copyfile(wanted.line, draft / LINE)
        if references is not None:
            shutil.copyfile(references, draft / reference_io.FILE)
        first = replace(
            found.manifest,
            name=wanted.name,
            version=wanted.version,
            release_counter=wanted.release_counter,
            line=line,
            thresholds={**found.manifest.thresholds, **wanted.thresholds},
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
        text = model_card.render(first, card, card.get("evaluation", {}))
        (draft / CARD).write_text(f"{text}\n{_origin(found.manifest)}", encoding="utf-8")
        manifest = _describe(draft, first)
        if golden is not None:
            golden(draft)
            manifest = _describe(draft, first)
        kept = manifest.model_sha256 == found.manifest.model_sha256
        kept = kept and (source / CERTIFICATE_NAME).is_file()
        if kept:
            shutil.copyfile(source / CERTIFICATE_NAME, draft / CERTIFICATE_NAME)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest, kept


def _origin(source: Manifest) -> str:
    return (
        "## Origin\n\n"
        f"Graphs of {source.name} {source.version}, release {source.release_counter}, manifest "
        f"{source.sha256}. The figures above were measured with that bundle, on parts of its line "
        "and of the catalogue, not on this line.\n"
    )


def _describe(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest of what lies there now."""
    own = (MANIFEST_NAME, SEAL_NAME, CERTIFICATE_NAME)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    files: dict[str, FileEntry] = {
        name: entry_of(folder / name) for name in names if name not in own
    }
    found = replace(manifest, files=files)
    (folder / MANIFEST_NAME).write_bytes(found.to_json())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle folder to start from")
    parser.add_argument("--line", type=Path, required=True, help="line file of the new line")
    parser.add_argument("--out", type=Path, required=True, help="bundle folder to write")
    parser.add_argument("--name", help="bundle name; default: name of the output folder")
    parser.add_argument("--version", default="0.1.0")
    parser.add_argument("--release", type=int, default=1, help="release counter, only ever grows")
    parser.add_argument(
        "--references", type=Path, help="of the line's parts (python -m training.references)"
    )
    parser.add_argument("--thresholds", type=Path, help="JSON object: name -> number")
    parser.add_argument(
        "--golden", type=Path, metavar="CASES", help="folder with cases.jsonl, as for export.bundle"
    )
    parser.add_argument("--golden-count", type=int, default=12, metavar="N", help="default 12")
    return parser


def main() -> int:
    args = _parser().parse_args()
    try:
        thresholds = {}
        if args.thresholds is not None:
            thresholds = json.loads(args.thresholds.read_text(encoding="utf-8"))
        wanted = Relined(
            args.line,
            args.name or args.out.name,
            args.version,
            args.release,
            args.references,
            thresholds,
        )
        golden = None
        if args.golden is not None:

            def golden(folder: Path) -> object:
                return golden_set.write(folder, args.golden, args.golden_count)

        manifest, kept = reline(args.bundle, args.out, wanted, golden)
    except (StationError, OSError, ValueError) as error:
        print(f"export.reline: {error}", file=sys.stderr)
        return 1
    certificate = "came along" if kept else "none, so the bundle only advises: UNSURE, never PASS"
    print(f"{args.out}  {manifest.name} {manifest.version}, line {manifest.line}")
    print(f"certificate: {certificate}")
    print(
        json.dumps(
            {
                "bundle": str(args.out),
                "release": manifest.release_counter,
                "line": manifest.line,
                "sha256": manifest.sha256,
                "certificate": kept,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
