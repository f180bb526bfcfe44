"""Access rules of a mosquitto broker for stations, consumers and commanders: `forge-station acl`.

It writes files and starts nothing. Who a client is, the broker takes from the CN of its
certificate. Each may write only what is its own to say: a station its events and status, a
commander commands, a consumer its receipts. So a stolen station key can neither speak for another
station nor give its own station a command (`pattern write .../%u/#` would allow that).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_station.errors import ConfigError
from forge_station.mes.settings import NAMESPACE, SparkplugConfig
from forge_station.mes.topics import MqttConfig, filled

Generation = Literal["2.0", "2.1"]
WRITTEN = ("evt", "sts", "rsp", "job")
"""First levels below `insp/v1` that the station writes; it reads `in`."""
BORN = ("NBIRTH", "NDATA", "NDEATH")
"""Sparkplug messages that the station writes; it reads NCMD and the STATE of its primary host."""
PLUGIN = "/usr/lib/x86_64-linux-gnu/mosquitto_acl_file.so"
DROP_IN = "conf.d"
"""Folder of files that the distribution's own mosquitto.conf includes. That one says where messages
are kept, and mosquitto refuses to start where it is said twice."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True)
class Parties:
    """Who uses the broker. Names of consumers and commanders are the CNs of their certificates."""

    stations: tuple[MqttConfig, ...]
    consumers: tuple[str, ...] = ()
    """May read all that stations say, and write their own receipts."""
    commanders: tuple[str, ...] = ()
    """May write commands as well; whether a station takes one, its keys decide."""
    sparkplug: Mapping[str, SparkplugConfig] = field(default_factory=dict)
    """The mirrors of those stations that have one, by station. A primary host is a consumer."""

    def __post_init__(self) -> None:
        names = [item.station for item in self.stations]
        for name in (*self.consumers, *self.commanders):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    "a name that cannot stand in an access file",
                    expected="1 to 64 letters, digits, _ . @ or -",
                    got=repr(name),
                )
        names += self.consumers
        names += [item for item in self.commanders if item not in self.consumers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                "one name for two parties: the broker could not tell them apart",
                got=", ".join(twice),
            )
        if not self.stations:
            raise ConfigError("no station", expected="one station file, or more")
        for station, mirror in self.sparkplug.items():
            host = mirror.primary_host
            if host is not None and host not in (*self.consumers, *self.commanders):
                raise ConfigError(
                    "nobody could tell the station that its Sparkplug primary host is online",
                    which=f"station {station}, sparkplug.primary_host {host}",
                    expected="the host among the consumers",
                    action=f"give the host a certificate with the CN {host} and name it there",
                )


def acl(parties: Parties) -> str:
    """The access file; the same form for mosquitto 2.0 and 2.1. What is not allowed is denied."""
    lines = ["# Written by `forge-station acl`. A user is the CN of a client certificate.", ""]
    for station in parties.stations:
        own = f"{station.root}/insp/v1"
        lines.append(f"user {station.station}")
        lines += [f"topic write {own}/{level}/#" for level in WRITTEN]
        lines.append(f"topic read {own}/in/#")
        lines.append(f"topic read {own}/sts/conn")  # whether another client has its id
        if station.version == "3.1.1":  # it publishes there to see whether it may, see `link`
            lines.append(f"topic read {own}/evt/probe")
        for flat in station.flat:
            topic = filled(flat.topic, station)
            lines.append(f"topic write {topic}" + ("/+" if flat.format == "values" else ""))
        if station.station in parties.sparkplug:
            mirror = parties.sparkplug[station.station]
            lines += [f"topic write {_node(mirror, kind, station)}" for kind in BORN]
            lines.append(f"topic read {_node(mirror, 'NCMD', station)}")
            if mirror.primary_host is not None:
                lines.append(f"topic read {NAMESPACE}/STATE/{mirror.primary_host}")
        lines.append("")
    for name in dict.fromkeys((*parties.consumers, *parties.commanders)):
        lines.append(f"user {name}")
        for station in parties.stations:
            own = f"{station.root}/insp/v1"
            lines += [f"topic read {own}/{level}/#" for level in WRITTEN]
            lines += [
                f"topic read {filled(flat.topic, station)}/#" for flat in station.flat
            ]  # `a/#` is also `a`
            if re.fullmatch(r"[A-Za-z0-9_-]{1,32}", name):
                lines.append(f"topic write {own}/in/receipt/{name}")
            if name in parties.commanders:
                lines.append(f"topic write {own}/in/cmd/+")
            if station.station in parties.sparkplug:
                mirror = parties.sparkplug[station.station]
                lines += [f"topic read {_node(mirror, kind, station)}" for kind in BORN]
                if name in (mirror.primary_host, *parties.commanders):
                    lines.append(f"topic write {_node(mirror, 'NCMD', station)}")
        if name in {mirror.primary_host for mirror in parties.sparkplug.values()}:
            lines.append(f"topic readwrite {NAMESPACE}/STATE/{name}")
        lines.append("")
    return "\n".join(lines)


def _node(mirror: SparkplugConfig, kind: str, station: MqttConfig) -> str:
    return f"{NAMESPACE}/{mirror.group}/{kind}/{mirror.node or station.station}"


def configuration(
    generation: Generation,
    folder: Path,
    *,
    port: int = 8883,
    plugin: str = PLUGIN,
) -> str:
    """A mosquitto.conf for mutual TLS: certificates are looked for in `folder`.

    It is whole by itself, or in a folder `conf.d` an addition to the distribution's own.
    """
    lines = [
        f"# Written by `forge-station acl` for mosquitto {generation}.",
        f"listener {port}",
        f"cafile {folder}/ca.crt",
        f"certfile {folder}/broker.crt",
        f"keyfile {folder}/broker.key",
        "require_certificate true",
        "use_identity_as_username true",
        "tls_version tlsv1.2",
        "allow_anonymous false",
    ]
    if generation == "2.0":
        lines += [f"acl_file {folder}/acl"]
    else:
        lines += [
            "# acl_file by itself is deprecated in 2.1; where its plugin lies differs.",
            f"plugin {plugin}",
            f"plugin_opt_acl_file {folder}/acl",
        ]
    lines += [
        "# Messages wait here for consumers that are away, and survive a restart of the broker.",
        "persistence true",
        *([] if folder.name == DROP_IN else ["persistence_location /var/lib/mosquitto/"]),
        "max_queued_messages 1000000",
        "max_packet_size 2000000",
        "# A confirmation does not wait for the next message of the station (up to 40 ms).",
        "set_tcp_nodelay true",
    ]
    return "\n".join(lines) + "\n"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write mosquitto.conf and the access file for mutual TLS. Each client's name is the CN of "
        "its certificate; a station's is its mqtt.station. Put ca.crt, broker.crt and broker.key "
        "beside them, readable by the user mosquitto, and restart it. In a folder conf.d the file "
        "is an addition to /etc/mosquitto/mosquitto.conf (Debian, Ubuntu), elsewhere it is whole: "
        "mosquitto -c FOLDER/mosquitto.conf. Example: forge-station acl --stations l3.yaml l4.yaml "
        "--consumers historian --commanders mes --out /etc/mosquitto/conf.d"
    )
    command.add_argument(
        "--stations", type=Path, nargs="+", required=True, metavar="FILE", help="station files"
    )
    command.add_argument(
        "--consumers", nargs="*", default=[], metavar="CN", help="may read, and write receipts"
    )
    command.add_argument(
        "--commanders", nargs="*", default=[], metavar="CN", help="may write commands as well"
    )
    command.add_argument(
        "--mosquitto",
        choices=("2.0", "2.1"),
        default="2.0",
        help="generation of the broker (`mosquitto -h` says it; default 2.0)",
    )
    command.add_argument("--port", type=int, default=8883, help="of the TLS listener")
    command.add_argument(
        "--plugin", default=PLUGIN, metavar="FILE", help=f"acl-file plugin of 2.1 ({PLUGIN})"
    )
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write; without it: print both"
    )


def run(
    args: argparse.Namespace, stations: Sequence[tuple[MqttConfig, SparkplugConfig | None]]
) -> int:
    """The command `forge-station acl` for the stations of the files in `args.stations`."""
    parties = Parties(
        tuple(station for station, _ in stations),
        tuple(args.consumers),
        tuple(args.commanders),
        {station.station: mirror for station, mirror in stations if mirror is not None},
    )
    folder = (args.out or Path("/etc/mosquitto/conf.d")).absolute()
    texts = {
        "mosquitto.conf": configuration(args.mosquitto, folder, port=args.port, plugin=args.plugin),
        "acl": acl(parties),
    }
    if args.out is None:
        sys.stdout.write("\n".join(f"# ---- {name}\n{text}" for name, text in texts.items()))
        return 0
    _write(folder, texts)
    for name in texts:
        print(folder / name)
    return 0


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            beside = folder / f".{name}.new"
            beside.write_text(text, encoding="utf-8")
            beside.replace(folder / name)
    except OSError as error:
        raise ConfigError(
            "the broker's files cannot be written", which=folder, got=error
        ) from error


__all__ = ["Generation", "Parties", "acl", "add_arguments", "configuration", "run"]
