"""The interface as a document: AsyncAPI 3.1 from the topic table, the schemas and the examples.

It describes one station (its topics, its broker) and sends nothing. There is no second source: what
the station validates against is what the document says.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from forge_station.errors import ConfigError
from forge_station.mes import flat, schema
from forge_station.mes.command import ROLES
from forge_station.mes.topics import TOPICS, FlatTopic, MqttConfig, Topic, filled, topic_of

ASYNCAPI = "3.1.0"
VERSION = "1.0.0"
"""Of the interface. Minor: optional fields were added. Major: another topic level than `v1`."""
RESERVED: tuple[str, ...] = ()
"""Commands whose form is fixed and which this release does not take."""

Json = dict[str, Any]

DESCRIPTION = """\
What a forge-station inspection station publishes, and what it takes.

* Events (`evt/`) come from a durable outbox, at least once, in order within a stream, not retained.
  Drop a message whose `id` you have. `streamSeq` counts 1, 2, 3 within `stream` and `epoch`: a hole
  is a message that you do not have (yet); the command `replay` brings it, or a receipt.
* Status (`sts/`) is retained: the latest value only.
* Only the outcome PASS is good. FAIL: a fault was found. UNSURE: a person must look. ERROR: the
  station could not decide. Anything else, or nothing, is not PASS.
* A higher minor version of a schema only adds optional fields: ignore what you do not know.
* `isSimulated` true: no real part was inspected; do not count it.
"""


@cache
def example(name: str) -> Json:
    """The shipped example of a kind of message."""
    file = resources.files(__package__) / "examples" / f"{name}.json"
    found: Json = json.loads(file.read_text(encoding="utf-8"))
    return found


def asyncapi(config: MqttConfig) -> Json:
    """The AsyncAPI document of the station, as plain data. The station is the application."""
    channels: Json = {}
    operations: Json = {}
    messages: Json = {}
    for topic in TOPICS.values():
        made = _command_messages() if topic.name == "command" else {topic.name: _message(topic)}
        messages |= made
        channels[topic.name] = _channel(config, topic, made)
        operations[_operation_name(topic)] = _operation(topic, made)
    for number, item in enumerate(config.flat, 1):
        name = f"flat{number}"
        messages[name] = _flat_message(item)
        channels[name] = _flat_channel(config, item, name)
        operations[f"send{name.capitalize()}"] = {
            "action": "send",
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
            "bindings": {"mqtt": {"qos": 0, "retain": True, "bindingVersion": "0.2.0"}},
        }
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": f"forge-station, station {config.station}",
            "version": VERSION,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"broker": _server(config)},
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": dict(_schemas())},
    }


def command_schemas() -> Iterator[tuple[str, Json]]:
    """Name and argument schema of every command."""
    yield from schema.load("command-1.0.json")["$defs"].items()


def _server(config: MqttConfig) -> Json:
    return {
        "host": f"{config.host}:{config.port}",
        "protocol": "secure-mqtt" if config.tls else "mqtt",
        "protocolVersion": config.version,
        "description": "The site's broker. Its access rules: `forge-station acl`.",
        "bindings": {
            "mqtt": {
                "clientId": config.station,
                "cleanSession": False,
                "lastWill": {
                    "topic": topic_of(config, "conn"),
                    "qos": 1,
                    "message": "conn with state CONNECTIONBROKEN",
                    "retain": True,
                },
                "keepAlive": config.keepalive_s,
                "sessionExpiryInterval": 3600,
                "bindingVersion": "0.2.0",
            }
        },
    }


def _channel(config: MqttConfig, topic: Topic, messages: Json) -> Json:
    found: Json = {
        "address": topic_of(config, topic.name),
        "title": topic.summary,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }
    meanings = {
        "cmdId": "The cmdId of the command.",
        "jobId": "The jobId.",
        "name": "The command's name, the same as in the message.",
        "consumer": "Who stored the messages: 1 to 32 letters, digits, _ or -.",
    }
    for level in re.findall(r"\{(\w+)\}", topic.path):
        parameter: Json = {"description": meanings[level]}
        if level == "name":
            parameter["enum"] = list(ROLES)
        found["parameters"] = {level: parameter}
    return found


def _operation_name(topic: Topic) -> str:
    verb = "receive" if topic.inbound else "send"
    return f"{verb}{topic.name[:1].upper()}{topic.name[1:]}"


def _operation(topic: Topic, messages: Json) -> Json:
    binding: Json = {"qos": topic.qos, "retain": topic.retain, "bindingVersion": "0.2.0"}
    if topic.expiry_s is not None:
        binding["messageExpiryInterval"] = topic.expiry_s
    found: Json = {
        "action": "receive" if topic.inbound else "send",
        "channel": {"$ref": f"#/channels/{topic.name}"},
        "summary": topic.summary,
        "messages": [{"$ref": f"#/channels/{topic.name}/messages/{name}"} for name in messages],
        "bindings": {"mqtt": binding},
    }
    if topic.name == "command":
        found["reply"] = {
            "channel": {"$ref": "#/channels/reply"},
            "messages": [{"$ref": "#/channels/reply/messages/reply"}],
        }
    if topic.reserved:
        found["x-reserved"] = True
        found["description"] = "Its form is fixed; this release does not send it."
    return found


def _message(topic: Topic) -> Json:
    found: Json = {
        "name": topic.name,
        "title": topic.summary,
        "contentType": "application/json",
        "payload": {"$ref": f"#/components/schemas/{_component(topic.schema)}"},
        "examples": [{"name": topic.name, "payload": example(topic.name)}],
        "bindings": _binding(),
    }
    if not topic.inbound:
        found["headers"] = _user_properties()
    return found


def _command_messages() -> Json:
    """One message a command: the common form, with its name and its arguments."""
    found = {}
    for name, rules in command_schemas():
        body: Json = {
            "allOf": [
                {"$ref": "#/components/schemas/command-1.0"},
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": name},
                        "args": {"$ref": f"#/components/schemas/command-1.0.{name}"},
                    },
                },
            ]
        }
        text = f"Needs a key with one of the roles {', '.join(sorted(ROLES[name]))}."
        item: Json = {
            "name": name,
            "title": rules["title"],
            "description": text,
            "contentType": "application/json",
            "payload": body,
            "bindings": _binding(),
        }
        if name == example("command")["name"]:
            item["examples"] = [{"name": name, "payload": example("command")}]
        if name in RESERVED:
            item["x-reserved"] = True
        found[f"command.{name}"] = item
    return found


def _binding() -> Json:
    return {"mqtt": {"payloadFormatIndicator": 1, "bindingVersion": "0.2.0"}}


def _user_properties() -> Json:
    """MQTT 5 user properties, under the attribute names of CloudEvents. All are text."""
    names = {
        "specversion": "Of CloudEvents, 1.0.",
        "id": "As in the body; of events.",
        "source": "As in the body.",
        "type": "As in the body.",
        "time": "As in the body; of events.",
        "dataschema": "File name of the schema.",
        "epoch": "As in the body; of events.",
        "seq": "As in the body; of events.",
    }
    properties = {name: {"type": "string", "description": text} for name, text in names.items()}
    return {"type": "object", "properties": properties}


def _flat_message(item: FlatTopic) -> Json:
    known = {name: flat.kind(path) for name, path in item.fields.items()}
    properties: Json = {
        name: {"type": [kind, "null"], "description": f"`{item.fields[name]}` of the verdict."}
        for name, kind in known.items()
    }
    payload: Json = {"type": "object", "required": list(known), "properties": properties}
    if item.format == "values":
        payload = {"type": "string", "description": "The bare value as text; empty for none."}
    content = "application/json" if item.format == "json" else "text/plain"
    return {"name": "flat", "title": "Chosen fields of the last verdict", "contentType": content,
            "payload": payload}  # fmt: skip


def _flat_channel(config: MqttConfig, item: FlatTopic, name: str) -> Json:
    found: Json = {
        "address": filled(item.topic, config),
        "title": "Chosen fields of the last verdict",
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
    }
    if item.format == "values":
        found["address"] += "/{field}"
        found["parameters"] = {"field": {"enum": list(item.fields), "description": "Its name."}}
    return found


def _schemas() -> Iterator[tuple[str, Json]]:
    """Every schema file as a component, its definitions as components beside it."""
    for file in schema.names():
        name = file.removesuffix(".json")
        content = schema.load(file)
        for part, rules in content.get("$defs", {}).items():
            yield f"{name}.{part}", _embedded(rules, name)
        outer = {
            key: value for key, value in content.items() if key not in ("$schema", "$id", "$defs")
        }
        yield name, _embedded(outer, name)


def _embedded(part: Any, name: str) -> Any:
    """A schema with its references turned into ones to the document's components."""
    if isinstance(part, Mapping):
        found = {key: _embedded(value, name) for key, value in part.items()}
        reference = found.get("$ref")
        if isinstance(reference, str):
            inner = reference.removeprefix("#/$defs/")
            target = f"{name}.{inner}" if inner != reference else _stem(reference)
            found["$ref"] = f"#/components/schemas/{target}"
        return found
    if isinstance(part, list):
        return [_embedded(item, name) for item in part]
    return part


def _component(kind: str) -> str:
    return kind.replace("/", "-")


def _stem(file: str) -> str:
    return file.removesuffix(".json")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write the interface of a station for those who connect to it: its topics, every field, "
        "examples, delivery rules. The AsyncAPI document is for machines (code generation, tests), "
        "the HTML page for people; it is one file and needs no network."
    )
    command.add_argument("--asyncapi", type=Path, metavar="FILE", help="AsyncAPI 3.1 (JSON)")
    command.add_argument("--html", type=Path, metavar="FILE", help="one page, self-contained")
    command.add_argument(
        "--schemas", type=Path, metavar="FOLDER", help="the JSON Schemas (2020-12) themselves"
    )


def run(args: argparse.Namespace, config: MqttConfig) -> int:
    """The command `forge-station interface`."""
    if not (args.asyncapi or args.html or args.schemas):
        raise ConfigError(
            "nothing to write", expected="--asyncapi FILE, --html FILE or --schemas FOLDER"
        )
    if args.asyncapi:
        document = json.dumps(asyncapi(config), indent=2, ensure_ascii=False) + "\n"
        _write(args.asyncapi, document)
    if args.html:
        from forge_station.mes.interface_page import page

        _write(args.html, page(config))
    if args.schemas:
        for name in schema.names():
            text = json.dumps(schema.load(name), indent=2, ensure_ascii=False) + "\n"
            _write(args.schemas / name, text)
    return 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError("cannot write", which=path, got=error) from error
    print(path)


__all__ = ["add_arguments", "asyncapi", "command_schemas", "example", "run"]
