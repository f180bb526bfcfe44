"""Puts a verdict into the outbox for the MES, and its summary on the retained topics.

It knows no broker: `publisher` sends what is put here. Every message is held against its schema
once, before it is stored: what breaks it is kept as a dead letter and raises an alarm, so that no
consumer ever gets it and the result is not lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from forge_station.mes import flat, payloads
from forge_station.mes.outbox import FORMAT_INVALID, Outbox
from forge_station.mes.topics import MqttConfig, filled, topic_of

log = logging.getLogger(__name__)


class Retained(Protocol):
    """What is needed of the publisher."""

    def set_status(self, name: str, fields: Mapping[str, Any]) -> None: ...
    def set_retained(self, topic: str, body: bytes) -> None: ...


def put_verdict(
    outbox: Outbox,
    config: MqttConfig,
    verdict: Mapping[str, Any],
    *,
    sw_version: str = "",
    context: Mapping[str, Any] | None = None,
) -> int:
    """Make a verdict (`Verdict.to_dict()`) durable for the MES; the seq of its message.

    Returns after the disk, never after the broker. The same result again is the same message.
    Raises OutboxError when it could not be stored.
    """
    try:
        messages = payloads.messages_of(
            verdict,
            config.root,
            sw_version=sw_version,
            context=context,
            grid_encoding=config.grid_encoding,
        )
    except ValueError as error:  # ContractError is one; so is a NaN, which is no JSON
        return _put_unsendable(outbox, config, verdict, error)
    seq = 0
    for message in messages:
        seq = outbox.put(message.stream, topic_of(config, message.stream), message.body, message.id)
    return seq


def tell_last(publisher: Retained, config: MqttConfig, verdict: Mapping[str, Any]) -> None:
    """The last verdict for those who want no history: status `last`, and the site's flat topics."""
    try:
        publisher.set_status("last", payloads.last_body(verdict))
        body = payloads.verdict_body(verdict, config.root) if config.flat else {}
    except ValueError as error:  # the verdict itself was kept, and told of, when it was put
        log.error("result %s is not shown as the last: %s", verdict["result_id"], error)
        return
    for item in config.flat:
        topic, found = filled(item.topic, config), flat.values(body, item.fields)
        if item.format == "json":
            publisher.set_retained(topic, payloads.encode(found))
        else:
            for name, value in found.items():
                publisher.set_retained(f"{topic}/{name}", flat.text(value).encode())


def _put_unsendable(
    outbox: Outbox, config: MqttConfig, verdict: Mapping[str, Any], error: ValueError
) -> int:
    """Keep a verdict that cannot be a message of the interface, for people, and tell of it."""
    result_id, fault = str(verdict["result_id"]), " ".join(str(error).split())
    log.error("result %s is not sent: %s", result_id, fault)
    body = json.dumps({"fault": fault, "verdict": verdict}, default=str).encode()
    seq = outbox.put(
        "verdict", topic_of(config, "verdict"), body, result_id, refused=FORMAT_INVALID
    )
    alarm = payloads.alarm_message(
        "DEAD_LETTER",
        f"a result breaks the schema of its message and is not sent: {fault}",
        config.root,
        severity=800,
        active=False,  # an event: nobody clears it
        params={"id": result_id, "seq": seq, "reason": FORMAT_INVALID},
    )
    outbox.put(alarm.stream, topic_of(config, "alarm"), alarm.body, alarm.id)
    return seq
