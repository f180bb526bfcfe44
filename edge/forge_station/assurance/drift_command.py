"""The command `forge-station drift`: what the drift watch of a station says, and orders to it."""

from __future__ import annotations

import argparse
import getpass
import json
from pathlib import Path
from typing import Any

from forge_station.assurance import charts, drift, report
from forge_station.assurance.drift import DriftConfig, Order, Watch
from forge_station.assurance.error import AssuranceError
from forge_station.config import StationConfig, load_station
from forge_station.contract import record
from forge_station.mes.stamp import utc_now

_TEACH = """\
The drift watch (`drift` in the station file) charts scores, readings, scan quality, FAIL and UNSURE
rates, and checks golden parts. At level 3 no part is called PASS any more, until somebody has found
the cause, every golden part was inspected and found right, and an engineer releases:

  forge-station drift status
  forge-station drift release --reason "lens cleaned, golden parts right"
  forge-station drift relearn --reason "new fixture, released by QE"     Phase I anew

An order is kept beside the outbox; the running station obeys it before its next part. Levels: 1
watch (the log), 2 act this shift (alarm DRIFT), 3 withhold (alarm DRIFT, every PASS is UNSURE).
`status` exits with the level; its last line is one JSON object. docs/QUALITY.md"""


def add_arguments(command: argparse.ArgumentParser, station: Path) -> None:
    """Arguments of `forge-station drift`."""
    command.description = _TEACH
    kinds = command.add_subparsers(title="actions", required=True, metavar="WHAT")
    for name, text in (
        ("status", "what is beyond its limit"),
        ("release", "end level 3 and set the charts back; what is usual is kept"),
        ("relearn", "forget what is usual and learn it anew"),
    ):
        own = kinds.add_parser(name, help=text)
        own.add_argument(
            "--station", type=Path, default=station, metavar="FILE",
            help=f"station file (default {station})",
        )  # fmt: skip
        if name != "status":
            own.add_argument("--reason", required=True, metavar="TEXT", help="what was found")
            own.add_argument("--by", default="", metavar="NAME", help="default: the login name")
        own.set_defaults(run=run, action=name)


def run(args: argparse.Namespace) -> int:
    """Show or order. Raises AssuranceError where the station has no drift watch."""
    config = load_station(args.station)
    if config.drift is None:
        raise AssuranceError(
            "the station has no drift watch", which=args.station, expected="the table `drift`",
            action="`drift: {}` turns it on, see station_config/README.md",
        )  # fmt: skip
    watch = Watch(config.drift, drift.state_path(config.outbox))
    if args.action == "status":
        return status(config, config.drift, watch)
    reason = args.reason.strip()
    if not reason:
        raise AssuranceError("an order needs its reason", which="--reason")
    order = Order(args.action, args.by.strip() or getpass.getuser(), reason, utc_now())
    path = drift.order_path(watch.path)
    report.put(path, json.dumps(record.write(order)) + "\n")
    waits = watch.refusal(order)
    print(f"ordered: {order.action}" + (f"; it waits for {waits}" if waits else ""))
    print(json.dumps({"order": order.action, "file": str(path), "waits": waits}))
    return 0


def status(config: StationConfig, own: DriftConfig, watch: Watch) -> int:
    """Print the state; the level is the exit code."""
    print(f"station {config.station}, level {watch.level}: {watch.text}")
    streams: dict[str, Any] = {}
    for product, signals in watch.state.streams.items():
        for name, stream in signals.items():
            if stream.centre is None:
                done = len(stream.first) * own.subgroup
                text = f"learning, {done} of {own.phase1_parts} parts"
            else:
                text = (
                    f"usual {stream.centre:.4g} +- {stream.spread:.3g}; "
                    f"CUSUM {max(stream.high, stream.low):.1f} of {drift.CUSUM.h:g}, "
                    f"EWMA {abs(stream.ewma):.2f} of {drift.EWMA.bound:.2f}"
                )
            print(f"  {product}: {name:<16} {text}")
            streams[f"{product}/{name}"] = text
    for product, rates in watch.state.rates.items():
        for name, rate in rates.items():
            if rate.usual is None:
                text = f"learning, {rate.parts} of {own.phase1_parts} parts"
            else:
                text = (
                    f"usual {100 * rate.usual:.2f} %; CUSUM {rate.sum:.1f} of {drift.RATE_LIMIT:g}"
                )
            print(f"  {product}: {name:<16} {text}")
            streams[f"{product}/{name}"] = text
    for text in watch.warnings:
        print(f"  note: {text}")
    false = charts.false_alarms_per_day(
        len(own.signals), 8640.0, own.subgroup, drift.CUSUM, drift.EWMA
    )
    print(f"  false alarms of level 1: {false:.2f} a day at a part every 10 s, day and night")
    told = {"level": watch.level, "text": watch.text, "charts": streams}
    print(json.dumps({**told, "withheld": watch.objection, "warnings": list(watch.warnings)}))
    return watch.level
