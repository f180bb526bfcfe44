"""`forge-station rollout`: a bundle to many stations, group by group, from an engineer's shell."""

from __future__ import annotations

import argparse
import getpass
import json
import logging
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from forge_station import private_key
from forge_station.bundles import archive
from forge_station.bundles.trust import Trust
from forge_station.config import load_station
from forge_station.contract import record as plain
from forge_station.errors import BundleError, ConfigError
from forge_station.mes import party
from forge_station.private_key import PrivateKey
from forge_station.rollout import help_texts, stick
from forge_station.rollout.plan import Group, Plan, PlanStation, read_plan
from forge_station.rollout.record import OVER, Folder, Release, RolloutRecord, StationRecord
from forge_station.rollout.runner import ABORT, APPROVED, PAUSE, UNSIGNED, Runner, doubt_of, wait_of
from forge_station.rollout.serve import FileServer
from forge_station.rollout.table import Screen, table
from forge_station.rollout.ways import MqttWay, Seen, StickWay, Way
from forge_station.signing import PublicKey

log = logging.getLogger(__name__)

DONE, NOT_DONE, WAITS = 0, 1, 2
TICK_S = 0.5
CHECK_S = 3.0
_ANYBODY = Trust(unsigned=True)


def add_arguments(command: argparse.ArgumentParser, station: Path) -> None:
    """Of `forge-station rollout`; `station`: the station file where none is named."""
    command.description, command.epilog = help_texts.DESCRIPTION, help_texts.PLAN_EXAMPLE
    actions = command.add_subparsers(required=True, metavar="ACTION")

    def added(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text, description = help_texts.ACTIONS[name]
        description, _, codes = description.rpartition("\n\n")
        action = actions.add_parser(
            name, help=text, description=description, epilog=codes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        action.set_defaults(run=run)
        return action

    for name, function in (
        ("check", _check), ("start", _start), ("resume", _resume), ("status", _status),
        ("pause", _pause), ("approve", _approve), ("abort", _abort),
    ):  # fmt: skip
        action = added(name, function)
        action.add_argument("plan", type=Path, metavar="PLAN", help="file of the rollout")
        action.add_argument(
            "--state",
            type=Path,
            metavar="FOLDER",
            help="of the rollout (default: PLAN without its ending, .rollout)",
        )
        action.add_argument("--json", action="store_true", help="last line: one JSON object")
        if name in ("start", "resume", "abort", "check"):
            action.add_argument(
                "--key", type=Path, required=name not in ("check", "abort"), metavar="PEM",
                help="private key that stations have under commands.keys, role release",
            )  # fmt: skip
            action.add_argument(
                "--issuer", default=getpass.getuser(), help="who orders (default: you)"
            )
            party.add_arguments(action)
        if name in ("start", "resume"):
            action.add_argument(
                "--no-wait", action="store_true",
                help="end (exit code 2) when only a person, a stick or the clock can move it on",
            )  # fmt: skip
        if name == "resume":
            action.add_argument(
                "--unsigned", action="append", default=[], metavar="STATION",
                help="count the report that lies on this station's stick now though nobody signed "
                "it: that one, no later one. May be repeated. An altered one never counts",
            )  # fmt: skip
        if name == "approve":
            action.add_argument("group", metavar="GROUP", help="that is done and good enough")
            action.add_argument("--by", default=getpass.getuser(), help="who (default: you)")
        if name == "abort":
            action.add_argument(
                "--back", action="store_true", help="stations that are done go back as well"
            )

    action = added("apply", _apply)
    action.add_argument(
        "stick", type=Path, metavar="FOLDER", help="`stick` of the plan, as seen here"
    )
    action.add_argument(
        "--station", type=Path, default=station, metavar="FILE", help=f"default {station}"
    )
    action.add_argument(
        "--no-wait", action="store_true", help="report how far it is now; run it again for the end"
    )
    action.add_argument("--json", action="store_true", help="last line: one JSON object")


def _folder(args: argparse.Namespace) -> Folder:
    return Folder(args.state or args.plan.with_suffix(".rollout"))


def _start(args: argparse.Namespace) -> int:
    folder = _folder(args)
    folder.require_new()
    plan = read_plan(args.plan)
    private_key.read(args.key)
    first = _first(plan)
    _require_alone(plan, first)
    folder.create(args.plan.read_bytes(), first)
    return _carry_out(folder, args)


def _resume(args: argparse.Namespace) -> int:
    folder = _folder(args)
    plan, found = _plan_of(folder, args.plan), folder.read()
    if found.phase == "RUNNING":
        _require_alone(plan, found)
    _ask_for_unsigned(folder, found, plan, args)
    paused = folder.asked(PAUSE) is not None
    folder.forget(PAUSE)
    with folder.alone() as free:
        pass
    if (paused or args.unsigned) and not free:
        print(f"{'paused no more; ' if paused else ''}the process that carries it out goes on")
        return DONE
    return _carry_out(folder, args)


def _require_alone(plan: Plan, found: RolloutRecord) -> None:
    """Raise InputError where a stick has an order of another rollout that is not over."""
    for station in plan.stations:
        item = found.station(station.name)
        if station.stick is not None and item.step in ("WAITING", "ORDERED", "UNDER_WAY"):
            stick.require_alone(station.stick, item.name, item.job, station.key)


def _ask_for_unsigned(
    folder: Folder, found: RolloutRecord, plan: Plan, args: argparse.Namespace
) -> None:
    """Ask that the report on each stick of `--unsigned` counts, by its digest: no other does.
    Raises ConfigError where it would not count either."""
    sticks = {item.name: item for item in plan.stations if item.stick is not None}
    asked = {}
    for name in args.unsigned:
        if name not in sticks:
            raise ConfigError(
                "no station by a stick", which="--unsigned",
                expected=", ".join(sticks) or "none: the plan has no stick", got=name,
            )  # fmt: skip
        report = _report_of(sticks[name], found.station(name))
        doubt = doubt_of(found.station(name), report, vouched=True)
        if doubt:
            raise ConfigError(
                "this report counts neither signed nor unsigned", which=f"--unsigned {name}",
                expected="the report of this rollout's bundle, as the station wrote it",
                got=f"{report.message['state']}, sha256 {report.digest[:16]}...: {doubt}",
                action="--unsigned is for a report that nobody signed, it does not help for an "
                "altered one: let the station write it again (rollout apply there)",
            )  # fmt: skip
        if report.doubt:
            asked[name] = report.digest
        else:
            print(f"{name}: its report is signed and counts without --unsigned")
    for name in sticks:  # what was asked before was for what lay there then
        folder.forget(UNSIGNED + name)
    for name, digest in asked.items():
        folder.ask(UNSIGNED + name, {"by": args.issuer, "report": digest})


def _report_of(item: PlanStation, found: StationRecord) -> stick.Report:
    assert item.stick is not None
    report = stick.read_reports(item.stick, item.key).get(found.job)
    if report is None:
        raise ConfigError(
            "no report that can be read lies on its stick", which=f"--unsigned {item.name}",
            expected=str(stick.place_of(item.stick, found.job) / stick.REPORT),
            action="plug the stick in; at the station `rollout apply` writes the report",
        )  # fmt: skip
    return report


def _first(plan: Plan) -> RolloutRecord:
    """All stations waiting, with the ids of their deployments."""
    files: dict[Path, Release] = {}
    for item in plan.stations:
        path = plan.bundle_of(item)
        if path not in files:
            files[path] = _release(path)
    groups = {name: group for group, names in plan.members().items() for name in names}
    rollout = f"{plan.name}.{secrets.token_hex(3)}"
    stations = tuple(
        StationRecord(
            item.name, groups[item.name], f"{rollout}.{item.name}", files[plan.bundle_of(item)]
        )
        for item in plan.stations
    )
    return RolloutRecord(rollout, plan.name, time.time(), stations)


def _release(path: Path) -> Release:
    """What a bundle file is; every byte of it is checked. Raises BundleError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        manifest = archive.take(path, Path(place) / "bundle", _ANYBODY).manifest
    return Release(
        path.name, manifest.name, manifest.version, manifest.release_counter, manifest.sha256
    )


def _plan_of(folder: Folder, plan: Path) -> Plan:
    """The plan as it was when the rollout began; its paths begin where the plan lies."""
    return read_plan(folder.plan, plan.absolute().parent)


@contextmanager
def _ways(plan: Plan, args: argparse.Namespace) -> Iterator[dict[str, Way]]:
    key = private_key.read(args.key)
    with ExitStack() as stack:
        found: dict[str, Way] = {}
        for item in plan.stations:
            way = _way(plan, item, args, key)
            stack.callback(way.close)
            found[item.name] = way
        yield found


def _way(plan: Plan, item: PlanStation, args: argparse.Namespace, key: PrivateKey | None) -> Way:
    if item.stick is not None:
        return StickWay(item.stick, plan.bundle_of(item), item.key)
    assert item.mqtt is not None  # read_plan has looked
    return MqttWay(party.config_of(args, item.mqtt), key, args.issuer)


def _carry_out(folder: Folder, args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        if not stack.enter_context(folder.alone()):
            raise ConfigError(
                "another process carries this rollout out",
                which=folder.path,
                got=f"process {(folder.path / 'lock').read_text().strip()}",
                action="leave it to that one; status, pause, approve and abort work from here",
            )
        plan = _plan_of(folder, args.plan)
        found = folder.read()
        if found.phase == "RUNNING" and folder.asked(ABORT) is None:
            _require_same(plan, found)
        ways = stack.enter_context(_ways(plan, args))
        if plan.serve:
            files = {plan.bundle_of(item) for item in plan.stations if item.stick is None}
            stack.enter_context(FileServer(plan.serve, files))
        by_name = {item.name: item for item in plan.stations}
        screen = Screen(sys.stdout)
        runner = Runner(
            folder, plan, ways, lambda name: plan.url_of(by_name[name]), told=screen.news
        )
        try:
            while runner.record.phase not in OVER:
                runner.step()
                screen.show(runner.record, runner.seen, runner.waits_for)
                if getattr(args, "no_wait", False) and runner.waits_for and not runner.busy:
                    break
                if runner.record.phase not in OVER:
                    time.sleep(TICK_S)
        except KeyboardInterrupt:
            print("\nstopped here; stations go on with what they have. To go on: rollout resume")
        return _tell_end(runner.record, runner.waits_for, args, screen.out)


def _require_same(plan: Plan, found: RolloutRecord) -> None:
    """The bundle files are those that the rollout began with. Raises BundleError."""
    releases = {path: _release(path) for path in {plan.bundle_of(s) for s in plan.stations}}
    for item in plan.stations:
        wanted, path = found.station(item.name).release, plan.bundle_of(item)
        got = releases[path]
        if got.sha256 == wanted.sha256:
            continue
        raise BundleError(
            "the bundle file is another one than when the rollout began",
            which=path,
            expected=f"{wanted.name} release {wanted.release_counter}, {wanted.sha256[:16]}...",
            got=f"release {got.release_counter}, {got.sha256[:16]}...",
            action="put the file back, or abort and begin another rollout",
        )


def _tell_end(found: RolloutRecord, waits_for: str, args: argparse.Namespace, out: TextIO) -> int:
    if args.json:
        print(json.dumps({**plain.write(found), "waits_for": waits_for}), file=out, flush=True)
    if found.phase == "SUCCEEDED":
        return DONE
    return NOT_DONE if found.phase in OVER else WAITS


def _check(args: argparse.Namespace) -> int:
    """Exit code 0: every station can be reached and takes deployments, or has a stick."""
    plan = read_plan(args.plan)
    first = _first(plan)
    ready, facts = True, []
    seen = _look_at(plan, args)
    keys = {item.name: item.key for item in plan.stations}
    for name, members in plan.members().items():
        print(f"group {name}")
        for item in (first.station(member) for member in members):
            found = seen.get(item.name)
            text = _by_stick(keys[item.name]) if found is None else _fitness(item, found)
            ready &= not text.startswith("NOT")
            facts.append({"station": item.name, "group": name, "text": text})
            release = f"{item.release.name} release {item.release.release_counter}"
            print(f"  {item.name:<24} {release}  {text}")
    if args.json:
        print(json.dumps({"ready": ready, "stations": facts}))
    return DONE if ready else NOT_DONE


def _by_stick(key: PublicKey | None) -> str:
    if key is None:
        return "by a stick; its report will not count: the plan names no key of it"
    return f"by a stick, its report signed with {key.id}"


def _fitness(item: StationRecord, seen: Seen) -> str:
    if seen.trouble:
        return f"NOT REACHED: {seen.trouble}"
    if not seen.online:
        return "NOT THERE: offline" if seen.online is False else "NOT THERE: never seen"
    if not seen.born:
        return "NOT READY: online, and no birth message of it is at the broker"
    if not seen.commands:
        return "NOT READY: it takes no commands (commands.keys is empty there, or it is starting)"
    if not seen.deploys:
        return "NOT READY: it has no bundle store (bundle of its station file is a plain folder)"
    if seen.running == item.release.sha256:
        return "runs it already"
    return f"online, runs {seen.running[:12] or 'an unknown bundle'}"


def _look_at(plan: Plan, args: argparse.Namespace) -> dict[str, Seen]:
    """What stations with a broker say within CHECK_S."""
    key = None if args.key is None else private_key.read(args.key)
    ways = {item.name: _way(plan, item, args, key) for item in plan.stations if item.stick is None}
    try:
        until = time.monotonic() + CHECK_S
        seen = {name: way.look() for name, way in ways.items()}
        while time.monotonic() < until and any(
            not s.online and not s.trouble for s in seen.values()
        ):
            time.sleep(0.1)
            seen = {name: way.look() for name, way in ways.items()}
        time.sleep(0.2)  # the birth comes after the word that it is there
        return {name: way.look() for name, way in ways.items()}
    finally:
        for way in ways.values():
            way.close()


def _status(args: argparse.Namespace) -> int:
    folder = _folder(args)
    found = folder.read()
    with folder.alone() as free:
        nobody = free and found.phase not in OVER
    waits_for = "resume (it is paused)" if folder.asked(PAUSE) is not None else ""
    if nobody:
        waits_for = "resume (no process carries it out)"
    print(table(found, {}, waits_for))
    if found.phase not in OVER:
        _tell_doubts(folder, found, args.plan)
    return _tell_end(found, waits_for, args, sys.stdout)


def _tell_doubts(folder: Folder, found: RolloutRecord, path: Path) -> None:
    """Why the reports that lie on sticks now do not count."""
    try:
        plan = _plan_of(folder, path)
    except ConfigError as error:  # where stations are stands above
        log.warning("what lies on sticks is not known: %s", error)
        return
    for station in plan.stations:
        item = found.station(station.name)
        if station.stick is None or item.step not in ("ORDERED", "UNDER_WAY"):
            continue
        report = stick.read_reports(station.stick, station.key).get(item.job)
        if report is None:
            continue
        if doubt := doubt_of(item, report, report.digest == item.unsigned_report):
            print(f"{item.name}: its report does not count: {doubt}")


def _pause(args: argparse.Namespace) -> int:
    return _request(args, PAUSE, {}, "paused: no further orders; go on with `rollout resume`")


def _approve(args: argparse.Namespace) -> int:
    folder = _folder(args)
    groups = {group.name: group for group in _plan_of(folder, args.plan).groups}
    if args.group not in groups:
        raise ConfigError("no such group", expected=", ".join(groups), got=args.group)
    name = APPROVED + args.group
    text = f"group {args.group} is approved by {args.by}"
    code = _request(args, name, {"by": args.by}, text)
    if code == DONE and (more := _still_before(folder.read(), groups, args.group)):
        print(more)
    return code


def _still_before(found: RolloutRecord, groups: Mapping[str, Group], name: str) -> str:
    """What the next group waits for although this one is approved; empty: nothing."""
    group, now_at = groups[name], list(groups)[found.group]
    if list(groups).index(name) < found.group:
        return f"it was over already: group {now_at} is at it"
    if name != now_at or not found.group_done:
        wait_s = group.gates.wait_s
        return "the next group begins once this one is done" + (
            f" and has been so for gates.wait_s ({wait_s:g} s)" if wait_s else ""
        )
    wait = wait_of(found, group, time.time())
    return f"the next group still waits for {wait}" if wait else ""


def _abort(args: argparse.Namespace) -> int:
    folder = _folder(args)
    with folder.alone() as free:
        pass
    if free and args.key is None and folder.read().phase not in OVER:
        raise ConfigError(
            "no process carries this rollout out, so this one must",
            expected="--key KEY",
            action="name the key that the rollout was started with",
        )
    facts: Mapping[str, Any] = {"by": args.issuer, "back": args.back}
    code = _request(args, ABORT, facts, "to be aborted", quiet=free)
    return _carry_out(folder, args) if free and code != NOT_DONE else code


def _request(
    args: argparse.Namespace, name: str, facts: Mapping[str, Any], text: str, quiet: bool = False
) -> int:
    folder = _folder(args)
    found = folder.read()
    if found.phase in OVER:
        print(f"it is over: {found.phase}")
        return NOT_DONE
    folder.ask(name, facts)
    folder.log(text)
    print(text)
    if args.json and not quiet:
        print(json.dumps({"id": found.id, "phase": found.phase, "asked": name}))
    return DONE


def _apply(args: argparse.Namespace) -> int:
    """At the station. Exit code 0: kept; 1: not; 2: not at its end yet."""
    station = load_station(args.station)
    own = station.release.report_key
    key = None if own is None else private_key.read(own)
    code, facts = DONE, []
    orders = stick.read_orders(args.stick, station.mqtt.station)
    public = None if key is None else private_key.public_half(key)
    if left := stick.open_orders(args.stick, station.mqtt.station, public):
        stick.require_alone(args.stick, station.mqtt.station, left[0].job, public)
    for place, order in orders:
        print(f"{order.name} {order.version}, release {order.release_counter}: {order.job}")

        def take(place: Path = place, order: stick.Order = order) -> Any:
            return stick.apply(place, order, station.bundle, station.trust, _progress)

        try:
            job = take()
        except BundleError as error:
            print(f"forge-station: {error}", file=sys.stderr)
            return NOT_DONE
        said = ""
        while True:
            stick.write_report(place, job, key)
            if job.state != said:
                said = job.state
                end = ": ".join(item for item in (job.code, job.detail) if item)
                print(f"  {job.state}  {end}".rstrip(), flush=True)
                if said == "STAGED":
                    print("  the station takes it up within seconds, or when it is started")
            if job.over or args.no_wait:
                break
            try:
                time.sleep(TICK_S)
            except KeyboardInterrupt:
                print("\nleft to the station; run this again for the report")
                break
            job = take()
        if key is None:
            print("  the report is not signed (release.report_key): it counts only if asked for")
        facts.append(job.message())
        if job.state != "SUCCEEDED":
            code = max(code, NOT_DONE if job.over else WAITS)
    if args.json:
        print(json.dumps(facts))
    return code


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)


__all__ = ["add_arguments"]
