"""Puts a verdict into the outbox for the MES: payloads and outbox together, in the right order.

It knows no broker: `publisher` sends what is put here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_station.mes import payloads
from forge_station.mes.outbox import Outbox
from forge_station.mes.topics import MqttConfig, topic_of


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
    """
    seq = 0
    for message in payloads.messages_of(
        verdict, config.root, sw_version=sw_version, context=context
    ):
        seq = outbox.put(message.stream, topic_of(config, message.stream), message.body, message.id)
    return seq
