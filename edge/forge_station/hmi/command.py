"""`forge-station hmi`: the operator's page as a process of its own; its users and its audit."""

from __future__ import annotations

import argparse
import getpass
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forge_station.config import StationConfig, load_station
from forge_station.errors import ConfigError
from forge_station.hmi.audit import Audit
from forge_station.hmi.sessions import unlock
from forge_station.hmi.settings import LOWEST_MM, SMALLEST_MM, Panel
from forge_station.hmi.users import Role, Users, UsersError, require_good
from forge_station.mes.topics import is_loopback

DESCRIPTION = """\
The operator's page: live verdicts, alarms, counters. A process of its own that reads what the
station writes; the line runs on whatever happens to it. docs/OPERATOR.md."""
EPILOG = """\
examples
  forge-station hmi --station station.yaml                    serve it (section `hmi` of the file)
  forge-station hmi user add anna --role admin                the first user must be an admin
  forge-station hmi user add ben --role operator --pin-stdin  the PIN as a line of stdin
  forge-station hmi user list
  forge-station hmi user remove ben
  forge-station hmi user unlock                               after wrong PINs: try again at once
  forge-station hmi audit                                     who did what; checks the chain

exit codes: 0; 1 the audit's chain is broken; 64 wrong usage, or the page cannot be served"""
USER = """\
Who may do more than look at the live screen. operator: review, history, acknowledge, pause; lead:
decides where reviewers differ, too; engineer, admin: the same, logged out sooner. A PIN has 6 to 12
digits. To change a role or a PIN remove the user, then add it again. Five wrong PINs lock the user
and the panel for a minute, each further one for twice as long, up to 15 minutes; `unlock` ends all
these locks. The audit names who did it."""
_ROLES = tuple(role.word for role in Role if role is not Role.VIEWER)


def add_arguments(command: argparse.ArgumentParser, station: Path) -> None:
    """`station`: the default of --station, here and below `user` and `audit`."""
    command.description, command.epilog = DESCRIPTION, EPILOG
    _station_argument(command, station)
    command.add_argument("--host", help="in place of hmi.host")
    command.add_argument("--port", type=int, help="in place of hmi.port")
    command.set_defaults(run=serve)
    actions = command.add_subparsers(title="actions", metavar="ACTION")

    user = actions.add_parser("user", help="add, list and remove users")
    user.description, user.formatter_class = USER, argparse.RawDescriptionHelpFormatter
    verbs = user.add_subparsers(title="verbs", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="add a user; asks for the PIN twice")
    add.description, add.formatter_class = USER, argparse.RawDescriptionHelpFormatter
    add.add_argument("name", help="as it is shown on the panel")
    add.add_argument("--role", choices=_ROLES, default="operator", help="default operator")
    add.add_argument("--pin-stdin", action="store_true", help="read the PIN from stdin")
    _finish(add, station, _add_user)
    _finish(verbs.add_parser("list", help="names and roles"), station, _list_users)
    remove = verbs.add_parser("remove", help="remove a user, and end the user's sessions")
    remove.add_argument("name")
    _finish(remove, station, _remove_user)
    _finish(verbs.add_parser("unlock", help="end all locks after wrong PINs"), station, _unlock)

    audit = actions.add_parser("audit", help="print the audit, and check its chain")
    audit.add_argument("--last", type=int, metavar="N", help="only the newest N lines")
    _finish(audit, station, _print_audit)


def serve(args: argparse.Namespace) -> int:
    """Until told to stop. Raises ConfigError when it may not or cannot be served."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "the page needs packages that are not installed",
                which=package,
                action="install forge-station[hmi]",
            )
    from forge_station.hmi.server import serve as serve_page

    config = load_station(args.station)
    host, port = args.host or config.hmi.host, args.port or config.hmi.port
    _require_allowed(config, host)
    _require_readable(config.hmi.panel)
    config = replace(config, hmi=replace(config.hmi, host=host, port=port))
    return serve_page(config)


def _require_readable(panel: Panel) -> None:
    """Says what a low panel does without. Raises ConfigError for one that the verdict does not fit
    on: smaller letters would be read wrongly from where they are not meant to be read."""
    width, height = panel.width_mm, panel.height_mm
    if width < SMALLEST_MM[0] or height < SMALLEST_MM[1]:
        raise ConfigError(
            "the panel is too small for a verdict that is read at 5 m",
            which="hmi.panel",
            expected="{:.0f} x {:.0f} mm or larger".format(*SMALLEST_MM),
            got=f"{width:.0f} x {height:.0f} mm",
            action="take a larger panel; for one that is only read from nearer declare a larger "
            "diag_in, which makes all of it smaller",
        )
    if height < LOWEST_MM:
        print(
            f"forge-station: a panel {height:.0f} mm high (hmi.panel) has no room for views, "
            f"checks and counters: expected {LOWEST_MM:.0f} mm. It shows the verdict, the last "
            "parts and the alarm",
            file=sys.stderr,
        )


def _require_allowed(config: StationConfig, host: str) -> None:
    """A page that other machines reach needs TLS and users."""
    if is_loopback(host):
        return
    if config.hmi.tls_cert is None:
        raise ConfigError(
            "the page is not served to other machines in the clear",
            which=host,
            expected="hmi.tls_cert and hmi.tls_key",
            got="neither",
        )
    if not _users(config).all():
        raise ConfigError(
            "the page is not served to other machines without users",
            which=host,
            action="run `forge-station hmi user add NAME --role admin`",
        )


def _add_user(config: StationConfig, args: argparse.Namespace) -> int:
    users = _users(config)
    pin = sys.stdin.readline().strip() if args.pin_stdin else _asked_pin()
    require_good(pin)
    user = users.add(args.name, Role.of(args.role), pin)
    _note(config, "user.add", None, {"name": user.name, "role": user.role.word})
    print(f"{user.name}: {user.role.word}")
    return 0


def _list_users(config: StationConfig, _: argparse.Namespace) -> int:
    for user in _users(config).all():
        print(f"{user.role.word:<9} {user.name}")
    return 0


def _remove_user(config: StationConfig, args: argparse.Namespace) -> int:
    user = _users(config).remove(args.name)
    _note(config, "user.remove", {"name": user.name, "role": user.role.word}, None)
    print(f"{user.name}: removed")
    return 0


def _unlock(config: StationConfig, _: argparse.Namespace) -> int:
    _note(config, "user.unlock", None, None)
    unlock(_users(config))
    print("all users and panels may try again at once")
    return 0


def _print_audit(config: StationConfig, args: argparse.Namespace) -> int:
    from forge_station.hmi.audit import AuditError

    found, fault = [], None
    try:
        for line in _audit(config).lines():
            found.append(line)
    except AuditError as error:
        fault = error
    for line in found[-args.last :] if args.last else found:
        who = f"{line['who'] or '-'} ({line['role']}, {line['panel']})"
        facts = [f"{key}={line[key]}" for key in ("before", "after", "reason") if line[key]]
        print(" ".join([line["ts"], line["action"], who, *facts]))
    if fault is not None:
        print(f"forge-station: {fault}", file=sys.stderr)
        return 1
    last = found[-1]["sha256"][:16] if found else "none"
    print(f"{len(found)} lines, the chain holds, last {last}")
    return 0


def _asked_pin() -> str:
    first = getpass.getpass("PIN (6 to 12 digits): ")
    if getpass.getpass("again: ") != first:
        raise UsersError("the two PINs differ", action="try again")
    return first


def _note(config: StationConfig, action: str, before: object, after: object) -> None:
    _audit(config).add(
        action, who=getpass.getuser(), role="shell", panel="command line",
        before=before, after=after,
    )  # fmt: skip


def _users(config: StationConfig) -> Users:
    return Users(_folder(config) / "users.json")


def _audit(config: StationConfig) -> Audit:
    return Audit(_folder(config) / "audit.jsonl")


def _folder(config: StationConfig) -> Path:
    return config.hmi.folder or config.outbox.with_name("hmi")


def _finish(
    command: argparse.ArgumentParser,
    station: Path,
    action: Callable[[StationConfig, argparse.Namespace], int],
) -> None:
    _station_argument(command, station)
    command.set_defaults(run=lambda args: action(load_station(args.station), args))


def _station_argument(command: argparse.ArgumentParser, station: Path) -> None:
    command.add_argument(
        "--station", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help=f"station file (default {station})",
    )  # fmt: skip
    command.set_defaults(station=station)


__all__ = ["add_arguments", "serve"]
