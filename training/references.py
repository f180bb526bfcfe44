"""References of a line's parts, for the third channel of the surface picture.

    python -m training.references --line station_config/demo/line.yaml --out references.npz
    python -m training.references --workpiece hex_nut flat_washer --out references.npz

A reference is the part without a defect, as the scan head would see it in every way the part can
lie (`forge_station.geometry.reference`). These come from the modelled nominal shapes; the station
fits them to each scanned part within its tolerance. `export.bundle --references FILE` packs them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from tqdm import tqdm

from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.spec import parse_line
from forge_station.geometry import reference_io
from forge_station.sim.references import CadReferences


def inspected_parts(line: Path) -> list[str]:
    """Ids of the parts of a line file whose surface is inspected, each once."""
    data = yaml.safe_load(line.read_text(encoding="utf-8"))
    products = parse_line(data, str(line)).products
    return sorted({part for p in products if "surface" in p.checks for part in p.parts})


def write(parts: Sequence[str], path: Path) -> int:
    """Build and write the references of some parts; returns the number of poses."""
    built = CadReferences()
    found = {part: built[part] for part in tqdm(parts, unit="part", desc="references")}
    path.parent.mkdir(parents=True, exist_ok=True)
    reference_io.save(path, found)
    return sum(len(item.poses) for item in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--line", type=Path, help="line file: its surface-inspected parts")
    group.add_argument(
        "--workpiece", nargs="+", choices=WORKPIECES, metavar="WORKPIECE", help="all their models"
    )
    parser.add_argument("--out", type=Path, required=True, help="the NPZ file to write")
    args = parser.parse_args()
    if args.line is not None:
        parts = inspected_parts(args.line)
        if not parts:
            raise SystemExit(f"{args.line}: no product has the check surface")
    else:
        parts = [model.id for model in CATALOGUE if model.workpiece in args.workpiece]
    poses = write(parts, args.out)
    size = args.out.stat().st_size
    print(json.dumps({"file": str(args.out), "parts": len(parts), "poses": poses, "bytes": size}))


if __name__ == "__main__":
    main()
