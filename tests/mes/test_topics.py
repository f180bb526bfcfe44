"""Connection settings and topics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_station.contract.error import ContractError
from forge_station.mes import schema
from forge_station.mes.topics import (
    STATUSES,
    STREAMS,
    TOPICS,
    FlatTopic,
    MqttConfig,
    events_filter,
    topic_of,
)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"station": "a/b"}, "station"),
        ({"station": "+"}, "station"),
        ({"site": ""}, "site"),
        ({"site": "x" * 33}, "site"),
        ({"line": "Linie Ä"}, "line"),
        ({"port": 0}, "port"),
        ({"port": 70000}, "port"),
        ({"host": " "}, "host"),
        ({"keepalive_s": 0}, "keepalive_s"),
        ({"host": "broker.plant"}, "tls"),
        ({"host": "192.168.1.4"}, "tls"),
        ({"host": "localhost.evil.example"}, "tls"),
        ({"tls": True, "tls_cert": Path("a")}, "tls_cert"),
        ({"tls": True, "tls_key": Path("a")}, "tls_key"),
        ({"tls_ca": Path("ca.pem")}, "tls"),
        ({"password_file": Path("secret")}, "username"),
        ({"root_template": "plant/vision"}, "root_template"),
        ({"root_template": "plant/{stations}"}, "root_template"),
        ({"root_template": "plant//{station}"}, "root_template"),
        ({"root_template": "/{station}"}, "root_template"),
        ({"root_template": "x" * 33 + "/{station}"}, "root_template"),
        ({"flat": (FlatTopic("a", {"x": "partId"}),) * 2}, "flat[1].topic"),
        (
            {"flat": (FlatTopic("enterprise/site/area/line/{station}/insp/x", {"x": "partId"}),)},
            "flat[0].topic",
        ),
    ],
)
def test_bad_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ContractError) as caught:
        MqttConfig(**settings)
    assert named in [fault.path for fault in caught.value.faults]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "127.0.0.2"},
        {"host": "broker.plant", "tls": True},
        {"host": "broker.plant", "insecure": True},
    ],
)
def test_plain_text_goes_to_this_machine_only_unless_written_out(settings: dict[str, Any]) -> None:
    assert MqttConfig(**settings).root == "enterprise/site/area/line/station"


def test_topics_separate_directions_by_prefix() -> None:
    config = MqttConfig(enterprise="acme", site="berlin", area="hall2", line="l3", station="s1")
    assert topic_of(config, "verdict") == "acme/berlin/hall2/l3/s1/insp/v1/evt/verdict"
    assert events_filter(config) == "acme/berlin/hall2/l3/s1/insp/v1/evt/#"
    assert {TOPICS[name].path.split("/")[0] for name in STREAMS} == {"evt"}
    assert {TOPICS[name].path.split("/")[0] for name in STATUSES} == {"sts"}


def test_root_is_where_the_site_wants_it() -> None:
    config = MqttConfig(root_template="plant7/{line}/vision-{station}", station="s1")
    assert topic_of(config, "verdict") == "plant7/line/vision-s1/insp/v1/evt/verdict"


def test_one_level_of_a_topic_is_given_or_a_wildcard() -> None:
    config = MqttConfig()
    assert topic_of(config, "command", "+") == f"{config.root}/insp/v1/in/cmd/+"
    assert topic_of(config, "reply", r"a\1") == f"{config.root}/insp/v1/rsp/a\\1"


@pytest.mark.parametrize("name", list(TOPICS))
def test_every_kind_of_message_has_a_schema_and_a_direction(name: str) -> None:
    topic = TOPICS[name]
    assert schema.load(f"{topic.schema.replace('/', '-')}.json")["properties"]["schema"] == {
        "const": topic.schema
    }
    assert topic.inbound == topic.path.startswith("in/")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "fields"),
        ({"Serial": "partid"}, "fields.Serial"),
        ({"Serial": "parts"}, "fields.Serial"),
        ({"Serial": "reasons.first.code"}, "fields.Serial"),
        ({"Serial": "seq"}, "fields.Serial"),
        ({"Serial No": "partId"}, "fields.Serial No"),
    ],
)
def test_bad_flat_topic_is_named(fields: dict[str, str], named: str) -> None:
    with pytest.raises(ContractError) as caught:
        FlatTopic("mes/{station}", fields)
    assert [fault.path for fault in caught.value.faults] == [named]


def test_wrong_field_of_a_flat_topic_is_answered_with_the_nearest() -> None:
    with pytest.raises(ContractError, match=r"did you mean partId\?"):
        FlatTopic("mes/{station}", {"Serial": "partid"})


def test_events_are_never_retained_and_statuses_always() -> None:
    assert not any(TOPICS[name].retain for name in STREAMS)
    assert all(TOPICS[name].retain for name in STATUSES)
