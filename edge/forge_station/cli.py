"""The command `forge-station`. Parses arguments and hands over; every error is one clear line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from forge_station import (
    bench,
    bundle_command,
    calibrate_command,
    capture_command,
    demo,
    demo_files,
    evidence_command,
    heap,
    offline,
    poses_command,
    replay_command,
    run,
    scan_bench,
    version,
)
from forge_station.assurance import audit_command, drift_command, msa_command
from forge_station.capture import patterns
from forge_station.config import load_station
from forge_station.doctor import command as doctor
from forge_station.errors import StationError
from forge_station.hmi import command as hmi_command
from forge_station.mes import acl, command_client, consumer, interface, link_bench, listen, party
from forge_station.rollout import command as rollout

USAGE_ERROR = 64
_PIPE_CLOSED = 141  # as a shell reports SIGPIPE; 0 would say that a part passed
_STATION = demo_files.STATION


class _Parser(argparse.ArgumentParser):
    """Wrong usage exits with 64: 2, the default of argparse, is the outcome UNSURE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 64 for wrong usage or configuration, else the command's own."""
    heap.settle()
    try:
        args = build_parser().parse_args(arguments)
        logging.basicConfig(
            level=logging.DEBUG if args.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        code: int = args.run(args)
        return code
    except StationError as error:
        print(f"forge-station: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print("forge-station: stopped", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    parser = _Parser(
        prog="forge-station",
        description="Inspect workpieces with a vision-language model and report to the MES.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="to begin with:\n"
        "  forge-station demo                    a whole station on simulated parts\n"
        "  forge-station doctor --station FILE   what stops this machine and this station\n"
        "  forge-station run --station FILE      serve a line; `trigger` tells it of a part\n"
        "  forge-station COMMAND --help          what a command does, with examples",
    )
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens, to stderr")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "demo",
        help="run the whole station on simulated parts",
        description="Bring up a broker, inspect simulated parts, print verdicts and a summary. "
        "The last line is one JSON object. Where there is no checkout, the files of the demo "
        f"station are written to {_STATION.parent} first, in the working directory.",
    )
    _station_argument(command)
    command.add_argument("--parts", type=int, default=12, metavar="N", help="parts (default 12)")
    command.add_argument(
        "--unpack",
        action="store_true",
        help="only write those files: the default of other commands, a start for your own",
    )
    command.set_defaults(run=_demo)

    command = commands.add_parser(
        "run",
        help="run the station on a line until told to stop",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_run_arguments(command)
    _station_argument(command)
    command.set_defaults(run=lambda args: run.run(load_station(args.station)))

    command = commands.add_parser("trigger", help="tell the running station that a part is there")
    run.add_trigger_arguments(command)
    _station_argument(command)
    command.set_defaults(run=lambda args: run.trigger(load_station(args.station), args))

    command = commands.add_parser(
        "inspect",
        help="inspect one part offline: scan, cloud, mesh or views",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    offline.add_arguments(command)
    command.set_defaults(run=offline.run)

    command = commands.add_parser(
        "listen",
        help="print what an MES receives",
        description="Subscribe to a station and print its messages: one line a verdict, gaps "
        "and repeats reported. It may run on any machine that has the station file and what that "
        "names (line file, public keys). A broker with access rules gives nothing to who listens "
        "as the station itself, and says no word about it: name a certificate of your own.",
        epilog="exit codes: 0; 1 with --count and --idle when fewer verdicts came; 64 wrong usage, "
        "or the broker cannot be used",
    )
    _station_argument(command)
    party.add_arguments(command)
    command.add_argument("--json", action="store_true", help="raw bodies, one a line")
    command.add_argument("--count", type=int, metavar="N", help="stop after N verdicts")
    command.add_argument(
        "--idle", type=float, metavar="SECONDS", help="stop when nothing came for so long"
    )
    command.add_argument(
        "--receipts",
        metavar="NAME",
        help="be a consumer of record of this name: send receipts, so that the station sends again "
        "what is missing; every event once, across restarts (docs/DELIVERY.md)",
    )
    command.add_argument(
        "--watermark",
        type=Path,
        metavar="FILE",
        help="with --receipts: where it keeps how far it is (default NAME.watermark.json)",
    )
    command.set_defaults(run=_listen)

    command = commands.add_parser(
        "patterns",
        help="write the pattern images for a projector",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    patterns.add_arguments(command)

    command = commands.add_parser(
        "calibrate",
        help="calibrate a scan head from board poses, and check it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    calibrate_command.add_arguments(command)

    command = commands.add_parser("interface", help="write the interface for an MES integrator")
    interface.add_arguments(command)
    _station_argument(command)
    command.set_defaults(run=lambda args: interface.run(args, load_station(args.station).mqtt))

    command = commands.add_parser(
        "capture",
        help="look at scanner or camera live, record a session, replay it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    capture_command.add_arguments(command)

    command = commands.add_parser(
        "doctor",
        help="check machine and station: devices, disks, clock, broker, certificate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(command)

    command = commands.add_parser(
        "bundle",
        help="sign, check, install and take back bundles",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bundle_command.add_arguments(command, _STATION)

    command = commands.add_parser(
        "rollout",
        help="bring a bundle to many stations, group by group",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rollout.add_arguments(command, _STATION)

    command = commands.add_parser(
        "evidence",
        help="list, mark and export what is kept of the parts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    evidence_command.add_arguments(command)
    _station_argument(command)
    command.set_defaults(run=evidence_command.run)

    command = commands.add_parser(
        "replay",
        help="judge stored parts again, with their own bundle or another",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay_command.add_arguments(command)
    _station_argument(command)
    command.set_defaults(run=replay_command.run)

    command = commands.add_parser(
        "msa",
        help="measurement system analysis: does it judge and measure a part the same way each time",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    msa_command.add_arguments(command)

    command = commands.add_parser(
        "audit",
        help="what labels prove of escapes and overkill",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit_command.add_arguments(command)

    command = commands.add_parser(
        "drift",
        help="the drift watch of a station: state, release, learning anew",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drift_command.add_arguments(command, _STATION)

    command = commands.add_parser(
        "hmi",
        help="the operator's page, its users and its audit",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hmi_command.add_arguments(command, _STATION)

    command = commands.add_parser("command", help="command a station through the broker")
    command_client.add_arguments(command)
    _station_argument(command)
    command.set_defaults(run=lambda args: command_client.run(args, load_station(args.station).mqtt))

    command = commands.add_parser("acl", help="write the access rules of a mosquitto broker")
    acl.add_arguments(command)
    command.set_defaults(
        run=lambda args: acl.run(
            args, [(item.mqtt, item.sparkplug) for item in map(load_station, args.stations)]
        )
    )

    command = commands.add_parser(
        "poses",
        help="calibrations of a head on a turntable or a robot",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    poses_command.add_arguments(command)

    command = commands.add_parser(
        "bench",
        help="measure the latency of every stage here",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{bench.__doc__}\nThe last line of the output is one JSON object.",
    )
    _station_argument(command)
    command.add_argument("--parts", type=int, default=60, metavar="N", help="parts (default 60)")
    command.add_argument(
        "--scans", type=int, default=12, metavar="N", help="different scans (default 12)"
    )
    command.add_argument(
        "--views", action="store_true", help="also time three views of a million points"
    )
    command.add_argument(
        "--scan",
        action="store_true",
        help="time decoding and separation alone, at 1280x960, against their targets; "
        "needs neither station nor model",
    )
    command.add_argument(
        "--link",
        action="store_true",
        help="time outbox and broker alone, beside an outbox that commits row by row",
    )
    command.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="with --link: each part (20)"
    )
    command.add_argument(
        "--backlog", type=int, default=20_000, metavar="N", help="with --link: rows (20000)"
    )
    command.set_defaults(run=_bench)
    return parser


def _demo(args: argparse.Namespace) -> int:
    if args.unpack or (args.station == _STATION and not _STATION.exists()):
        demo_files.unpack()
        print(f"written: {_STATION.parent}")
    return 0 if args.unpack else demo.run(load_station(args.station), args.parts)


def _bench(args: argparse.Namespace) -> int:
    if args.scan:
        return scan_bench.run()
    if args.link:
        return link_bench.run(args.seconds, args.backlog)
    station = load_station(args.station)
    return bench.run(station, args.parts, scans=args.scans, views=args.views)


def _listen(args: argparse.Namespace) -> int:
    mqtt = party.config_of(args, load_station(args.station).mqtt)
    if args.receipts is not None:
        file = args.watermark or Path(f"{args.receipts}.watermark.json")
        return consumer.run(
            mqtt, args.receipts, file, sys.stdout,
            as_json=args.json, count=args.count, idle_s=args.idle,
        )  # fmt: skip
    return listen.run(mqtt, sys.stdout, as_json=args.json, count=args.count, idle_s=args.idle)


def _station_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--station",
        type=Path,
        default=_STATION,
        metavar="FILE",
        help=f"station file (default {_STATION}); every key: station_config/README.md",
    )


if __name__ == "__main__":
    sys.exit(main())
