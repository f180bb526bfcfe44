"""The command `forge-station doctor`: runs the checks, prints a line each, ends with a code."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from forge_station.config import load_station
from forge_station.doctor import machine, station
from forge_station.doctor.lines import LEVELS, Line, guarded, worst
from forge_station.errors import ConfigError

DESCRIPTION = """\
Check this machine, and with --station FILE this station, before a part waits for it: devices (each
camera is opened and must give a frame), versions against the bundle, where ONNX Runtime can really
run, clock, network, disks, certificate, broker, permissions.

Nothing is changed: a small file is written to each disk and removed again, and nothing is shown
by a projector. What may hang runs in a process of its own with a time limit.
"""
EPILOG = """\
Exit code: 0 all pass, 1 something to look at (warn), 2 the station cannot work (fail), 64 wrong
usage.

Examples:
  forge-station doctor                             the machine alone
  forge-station doctor --station station.yaml
  forge-station doctor --station station.yaml --json | jq '.lines[] | select(.level != "pass")'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--station", type=Path, metavar="FILE", help="also check this station")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make all checks; returns the exit code."""
    lines: list[Line] = []

    def tell(found: list[Line]) -> None:
        lines.extend(found)
        if not args.json:
            for line in found:
                print(line, flush=True)

    tell(guarded("versions", machine.versions))
    tell(guarded("drivers", machine.drivers))
    tell(guarded("clock", machine.clock))
    tell(guarded("permissions", machine.permissions))
    if args.station is None:
        tell(guarded("provider", machine.providers))
        tell(guarded("network", machine.network))
        tell(guarded("disk", lambda: machine.disk(Path.cwd(), "disk")))
    else:
        try:
            config = load_station(args.station)
        except ConfigError as error:
            text = " ".join(str(error).split())
            tell([Line("fail", "station file", text, "Correct it; the rest was not checked.")])
        else:
            tell([Line("pass", "station file", f"{args.station}: {config.station}")])
            tell(station.checks(config))
    level = worst(lines)
    counts = {name: sum(line.level == name for line in lines) for name in LEVELS}
    if args.json:
        print(json.dumps({"level": level, **counts, "lines": [asdict(line) for line in lines]}))
    else:
        print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return LEVELS.index(level)
