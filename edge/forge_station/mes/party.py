"""Who connects to the broker, where it is not the station: options of `command` and `listen`.

A station file says how the station reaches its broker. A broker with access rules knows each party
by its own certificate or user, so whoever listens or commands has to say which is his.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from forge_station.mes.topics import MqttConfig

_OPTIONS = ("tls_cert", "tls_key", "username", "password_file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four options, as a group of their own."""
    group = parser.add_argument_group("who you are at the broker, not the station")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="your certificate (PEM)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    group.add_argument("--username", metavar="NAME", help="your name, where it goes by password")
    group.add_argument("--password-file", type=Path, metavar="FILE", help="its password")


def config_of(args: argparse.Namespace, station: MqttConfig) -> MqttConfig:
    """How this party reaches the station's broker. Raises ConfigError for half a pair."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    return replace(station, **given)


__all__ = ["add_arguments", "config_of"]
