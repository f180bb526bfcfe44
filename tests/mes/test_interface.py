"""The AsyncAPI document and the page: complete, valid, and from the same source as the messages."""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from forge_station.errors import ConfigError
from forge_station.mes import interface, schema
from forge_station.mes.command import ROLES
from forge_station.mes.interface_page import page
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.report import put_verdict
from forge_station.mes.topics import TOPICS, FlatTopic, MqttConfig
from tests.mes import golden, node_rig
from tests.mes.rig import ScriptedBroker, verdict

CONFIG = MqttConfig(
    enterprise="acme",
    flat=(
        FlatTopic("mes/{station}/last", {"Serial": "partId", "Cells": "cells"}),
        FlatTopic("tulip/{station}", {"Result": "verdict"}, "values"),
    ),
)
DOCUMENT = interface.asyncapi(CONFIG)


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(part, list):
        for item in part:
            yield from references(item)


def follow(reference: str) -> Any:
    found: Any = DOCUMENT
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return found


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert len(found) > 50
    for reference in found:
        assert reference.startswith("#/")
        assert follow(reference) is not None


def test_every_topic_is_there_with_its_delivery() -> None:
    for name, topic in TOPICS.items():
        (operation,) = [
            item
            for item in DOCUMENT["operations"].values()
            if item["channel"]["$ref"] == f"#/channels/{name}"
        ]
        assert operation["action"] == ("receive" if topic.inbound else "send")
        binding = operation["bindings"]["mqtt"]
        assert (binding["qos"], binding["retain"]) == (topic.qos, topic.retain)
        assert binding.get("messageExpiryInterval") == topic.expiry_s
        address = DOCUMENT["channels"][name]["address"]
        assert address == f"acme/site/area/line/station/insp/v1/{topic.path}"
        levels = set(re.findall(r"\{(\w+)\}", address))
        assert levels == set(DOCUMENT["channels"][name].get("parameters", {}))


@pytest.mark.parametrize("name", [item for item in TOPICS if item != "command"])
def test_example_in_the_document_keeps_the_schema_in_the_document(name: str) -> None:
    registry: Registry[Any] = Registry().with_resource(
        "doc", Resource.from_contents(DOCUMENT, default_specification=DRAFT202012)
    )
    message = DOCUMENT["components"]["messages"][name]
    (example,) = [item["payload"] for item in message["examples"]]
    assert example == golden.read()[name]
    validator = Draft202012Validator(
        {"$ref": f"doc{message['payload']['$ref']}"}, registry=registry
    )
    assert validator.is_valid(example)
    assert not validator.is_valid({**example, "schema": "other/1.0"})


def test_every_command_is_a_message_with_its_arguments() -> None:
    names = {f"command.{name}" for name in ROLES}
    assert set(DOCUMENT["channels"]["command"]["messages"]) == names
    part = DOCUMENT["components"]["schemas"]["command-1.0.setThreshold"]
    assert part["required"] == ["name", "value"]
    assert DOCUMENT["operations"]["receiveCommand"]["reply"]["channel"] == {
        "$ref": "#/channels/reply"
    }
    reserved = {
        name for name, item in DOCUMENT["components"]["messages"].items() if item.get("x-reserved")
    }
    assert reserved == set()


def test_flat_topics_of_the_site_are_in_the_document() -> None:
    first, second = (DOCUMENT["channels"][name] for name in ("flat1", "flat2"))
    assert first["address"] == "mes/station/last"
    payload = DOCUMENT["components"]["messages"]["flat1"]["payload"]
    assert payload["properties"]["Cells"]["type"] == ["integer", "null"]
    assert second["address"] == "tulip/station/{field}"
    assert second["parameters"]["field"]["enum"] == ["Result"]


def test_user_properties_are_those_of_the_document_and_say_what_the_body_says(
    tmp_path: Path,
) -> None:
    broker = ScriptedBroker()
    with (
        Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox,
        Publisher(outbox, CONFIG, connect=broker.connect) as publisher,
    ):
        put_verdict(outbox, CONFIG, verdict(result_id="r-1").to_dict())
        assert publisher.drain(5.0)
    told = {item.topic.rsplit("/", 1)[-1]: item for item in broker.got}
    headers = DOCUMENT["components"]["messages"]["verdict"]["headers"]["properties"]
    body, properties = json.loads(told["verdict"].body), dict(told["verdict"].properties)
    assert set(properties) == set(headers)
    for name in ("id", "source", "type", "epoch", "seq"):
        assert properties[name] == str(body[name])
    assert properties["specversion"] == "1.0"
    assert properties["dataschema"] == "verdict-1.0.json"
    conn = dict(told["conn"].properties)
    assert (conn["type"], conn["dataschema"]) == ("forge-station.conn", "conn-1.0.json")


def test_reference_parser_accepts_the_document_and_refuses_a_broken_one(tmp_path: Path) -> None:
    node = node_rig.require_packages()
    broken = copy.deepcopy(DOCUMENT)
    broken["operations"]["sendVerdict"]["bindings"]["mqtt"]["qos"] = 7
    files = []
    for number, document in enumerate((DOCUMENT, broken)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(document))
    done = subprocess.run(
        [node, Path(__file__).with_name("parse_asyncapi.mjs"), node_rig.FOLDER / "x.js", *files],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    good, bad = (json.loads(line) for line in done.stdout.splitlines())
    assert good == []
    assert any("qos" in item for item in bad)


class Page(HTMLParser):
    """Collects what a page would ask for, its anchors, and whether its elements close."""

    VOID = frozenset({"meta", "br", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.asks.append(tag)
        self.asks += [name for name in ("src", "srcset", "action") if name in given]
        target = given.get("href")
        if target is not None:
            (self.links.add(target[1:]) if target.startswith("#") else self.asks.append(target))
        if given.get("id"):
            self.ids.add(str(given["id"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    "config", [CONFIG, MqttConfig(host="b", tls=True), MqttConfig(host="b", insecure=True)]
)
def test_page_is_whole_and_asks_for_nothing(config: MqttConfig) -> None:
    text = page(config)
    read = Page()
    read.feed(text)
    assert read.open == []
    assert read.asks == []
    assert read.links <= read.ids
    assert not re.search(r"@import|url\(", text)
    words = "".join(read.text)
    for name in (*TOPICS, *ROLES):
        assert name in words
    for file in schema.names():
        for field in schema.load(file).get("properties", {}):
            assert field in words, (file, field)
    assert "Not encrypted" in words or config.security != "insecure"


def test_command_writes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        asyncapi=tmp_path / "a.json", html=tmp_path / "new" / "a.html", schemas=tmp_path / "s"
    )
    assert interface.run(args, CONFIG) == 0
    assert json.loads(args.asyncapi.read_text()) == DOCUMENT
    assert args.html.read_text() == page(CONFIG)
    assert {item.name for item in args.schemas.iterdir()} == set(schema.names())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(schema.names())
    empty = argparse.Namespace(asyncapi=None, html=None, schemas=None)
    with pytest.raises(ConfigError, match="nothing to write"):
        interface.run(empty, CONFIG)
