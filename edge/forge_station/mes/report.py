"""Puts a verdict into the outbox for the MES: payloads and outbox together, in the right order.

It knows no broker: `publisher` sends what is put here. Every message is held against its schema
once, before it is stored: what breaks it is kept as a dead letter and raises an alarm, so that no
consumer ever gets it and the result is not lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from forge_station.mes import payloads
from forge_station.mes.outbox import FORMAT_INVALID, Outbox
from forge_station.mes.topics import MqttConfig, topic_of

log = logging.getLogger(__name__)


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
            verdict, config.root, sw_version=sw_version, context=context
        )
    except ValueError as error:  # ContractError is one; so is a NaN, which is no JSON
        return _put_unsendable(outbox, config, verdict, error)
    seq = 0
    for message in messages:
        seq = outbox.put(message.stream, topic_of(config, message.stream), message.body, message.id)
    return seq


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
        params={"id": result_id, "seq": seq, "reason": FORMAT_INVALID},
    )
    outbox.put(alarm.stream, topic_of(config, "alarm"), alarm.body, alarm.id)
    return seq
