"""The plan file of a rollout: which bundle, which stations, in which groups, behind which gates.

It reads YAML and checks it; it reaches no station.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from forge_station.config import load_station, read_yaml
from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit, NotNegative, Probability
from forge_station.errors import ConfigError
from forge_station.mes.topics import MqttConfig
from forge_station.signing import PublicKey, public_key

Name = Annotated[
    str, Limit(pattern=r"[A-Za-z0-9_-]{1,24}", meaning="1 to 24 letters, digits, _ or -")
]


@dataclass(frozen=True)
class Gates:
    """What a group must show before the next one begins. A station itself judges more strictly or
    less, by its own `release` section; these are the rollout's."""

    max_failed: Probability = 0.0
    """Share of the group's stations that may fail; one more stops the rollout."""
    shadow_disagree: Probability = 1.0
    """Share of the live parts of SHADOW that the new bundle may judge differently."""
    trial_fail: Probability = 1.0
    """Share of FAIL in the trial. A station over it, or over one of the others, has failed."""
    trial_unsure: Probability = 1.0
    """Share of UNSURE and ERROR in the trial."""
    timeout_s: Annotated[float, Limit(1.0, 2_592_000.0)] = 86_400.0
    """A station that is not done so long after its order has failed."""
    wait_s: NotNegative = 0.0
    """How long the group must have been done before the next one begins."""
    approval: bool = False
    """The next group begins only after `forge-station rollout approve PLAN GROUP`."""


@dataclass(frozen=True)
class Group:
    """Stations that get the bundle at the same time: named, or all up to a share of the plan's."""

    name: Name
    stations: tuple[str, ...] = ()
    share: Probability | None = None
    """With the groups before it so many of all stations: 0.25 is every fourth. 1: all others."""
    gates: Gates = field(default_factory=Gates)


@dataclass(frozen=True)
class PlanStation:
    """One station: reached through its broker, or by a stick."""

    name: Name
    mqtt: MqttConfig | None = None
    """Its broker and topic, in place of the plan's."""
    file: Path | None = None
    """Its station file, in place of `mqtt`."""
    stick: Path | None = None
    """A folder that is carried to the station and back (it has no network)."""
    key: PublicKey | None = None
    """Public half of its `release.report_key`: a report on its stick counts when this signed it."""
    bundle: Path | None = None
    """Its own bundle file, where it needs another one (another processor)."""
    url: str | None = None
    """Where it gets its bundle file, in place of the plan's."""


@dataclass(frozen=True)
class Plan:
    """What `read_plan` gives. Paths are absolute; each station without a stick has its `mqtt`."""

    name: Name
    stations: tuple[PlanStation, ...]
    groups: tuple[Group, ...] = (Group("all", share=1.0),)
    bundle: Path | None = None
    url: str | None = None
    """`https://files.plant/{file}`: where stations get it; {file} is the name of the bundle file.
    Or a path at the station."""
    serve: Annotated[
        str, Limit(pattern=r"(http://[^/\s]+:\d+)?", meaning="http://ADDRESS:PORT")
    ] = ""
    """Serve the file from here while the rollout runs; the address as stations see it."""
    when_exceeded: Literal["roll_back", "stop"] = "roll_back"
    """When a group has more failures than it may: take the bundle back from all that got it, or
    only begin no more."""
    allow_downgrade: bool = False
    """Stations on which a later release has run may take this one."""
    at_once: Annotated[int, Limit(1, 1000)] = 10
    """So many stations are under way at the same time."""

    def bundle_of(self, station: PlanStation) -> Path:
        """Its bundle file."""
        path = station.bundle or self.bundle
        assert path is not None  # read_plan has looked
        return path

    def url_of(self, station: PlanStation) -> str:
        """Where it gets the file."""
        served = f"{self.serve}/{{file}}" if self.serve else ""
        url = station.url or self.url or served
        return url.replace("{file}", self.bundle_of(station).name)

    def members(self) -> dict[str, tuple[str, ...]]:
        """Group -> its stations. Raises ContractError when a station is in none, or in two."""
        names = [item.name for item in self.stations]
        left, found = list(names), {}
        faults = []
        for number, group in enumerate(self.groups):
            where = f"groups[{number}]"
            for name in group.stations:
                if name not in left:
                    why = "in a group before" if name in names else "unknown"
                    faults.append(Fault(where, f"{name}, {why}", ", ".join(left) or "none left"))
            own = [name for name in left if name in group.stations]
            left = [name for name in left if name not in own]
            if group.share is not None:
                before = len(names) - len(left)
                more = max(0, math.ceil(group.share * len(names) - 1e-9) - before)
                own, left = own + left[:more], left[more:]
            if not own:
                faults.append(Fault(where, "no station", "stations: [...], or a larger share"))
            found[group.name] = tuple(own)
        if left:
            faults.append(Fault("groups", f"without {', '.join(left)}", "a last group of share: 1"))
        if faults:
            raise ContractError("the groups do not fit the stations", faults=faults)
        return found


def read_plan(path: Path, place: Path | None = None) -> Plan:
    """Read a plan file. Its paths begin in `place`, by default where it lies. Raises ConfigError
    with every problem."""
    data = read_yaml(path)
    place = (place or path.parent).absolute()
    shared: Mapping[str, Any] = {}
    if isinstance(data, dict):
        data = dict(data)
        shared = _mapping(data.pop("mqtt", None))
        gates = _mapping(data.pop("gates", None))
        for key, own in (("stations", _with_mqtt(shared)), ("groups", _with_gates(gates))):
            if isinstance(data.get(key), list):
                data[key] = [own(item) if isinstance(item, dict) else item for item in data[key]]
        if "groups" not in data:
            data["groups"] = [{"name": "all", "share": 1, "gates": gates}]
    converters = {
        Path: lambda value: _path(value, place),
        PublicKey: lambda value: _key(value, place),
    }
    try:
        plan = record.read(Plan, data, converters=converters)
        plan = replace(plan, stations=tuple(map(_reached, plan.stations)))
        faults = _faults(plan)
        if faults:
            raise ContractError("the plan is not complete", faults=faults)
        plan.members()
    except ConfigError:
        raise
    except ContractError as error:
        raise ConfigError("wrong plan file", which=path, faults=error.faults) from error
    return plan


def _with_mqtt(shared: Mapping[str, Any]) -> Any:
    """What a station's entry becomes: the plan's broker, its own words, its name as its level."""

    def own(entry: dict[str, Any]) -> dict[str, Any]:
        if "stick" in entry or "file" in entry:
            return entry
        named = {"station": entry["name"]} if "name" in entry else {}
        mqtt = entry.get("mqtt")
        if mqtt is not None and not isinstance(mqtt, dict):
            return entry
        return {**entry, "mqtt": {**shared, **named, **(mqtt or {})}}

    return own


def _with_gates(shared: Mapping[str, Any]) -> Any:
    def own(entry: dict[str, Any]) -> dict[str, Any]:
        gates = entry.get("gates")
        if gates is not None and not isinstance(gates, dict):
            return entry
        return {**entry, "gates": {**shared, **(gates or {})}}

    return own


def _reached(station: PlanStation) -> PlanStation:
    if station.file is None or station.mqtt is not None:
        return station
    return replace(station, mqtt=load_station(station.file).mqtt)


def _faults(plan: Plan) -> list[Fault]:
    faults = []
    for kind, names in (
        ("stations", [item.name for item in plan.stations]),
        ("groups", [item.name for item in plan.groups]),
    ):
        for number, name in enumerate(names):
            if name in names[:number]:
                faults.append(Fault(f"{kind}[{number}].name", name, "a name that is not given yet"))
    if not plan.stations:
        faults.append(Fault("stations", "none", "one station, or more"))
    for number, item in enumerate(plan.stations):
        where = f"stations[{number}]"
        if item.stick is not None and (item.mqtt or item.file or item.url):
            faults.append(Fault(where, "a stick and a broker", "stick alone, or mqtt or file"))
        if item.stick is None and item.key is not None:
            allowed = "with a stick alone: a broker knows its stations"
            faults.append(Fault(f"{where}.key", "a key of reports", allowed))
        if item.stick is None and not (item.url or plan.url or plan.serve):
            faults.append(Fault(f"{where}.url", "none", "url or serve, here or for all stations"))
        if item.bundle is None and plan.bundle is None:
            faults.append(Fault(f"{where}.bundle", "none", "bundle, here or for all stations"))
    named = {"bundle": plan.bundle}  # as the person wrote it
    named |= {f"stations[{n}].bundle": item.bundle for n, item in enumerate(plan.stations)}
    for where, bundle in named.items():
        if bundle is not None and not bundle.is_file():
            allowed = "a bundle file (forge-station bundle pack)"
            faults.append(Fault(where, f"{bundle}: no file", allowed))
    bundles = {item.bundle or plan.bundle for item in plan.stations}
    names = [path.name for path in bundles if path is not None]
    if len(set(names)) < len(names):
        faults.append(
            Fault("bundle", "two files of one name", "names that differ: stations see it")
        )
    return faults


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _path(value: object, place: Path) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a path")
    return place / Path(value).expanduser()


def _key(value: object, place: Path) -> PublicKey:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a PEM file of an Ed25519 public key, or its 32 bytes as base64")
    try:
        return public_key(value, place)
    except ConfigError as error:
        raise ValueError(str(error)) from error
