"""What the publisher puts on the wire: a stored row, a retained status, the word on lost numbers.

It composes; `publisher` decides when and `payloads` knows the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_station.mes import payloads
from forge_station.mes.link import Outgoing
from forge_station.mes.outbox import Outbox, Row
from forge_station.mes.stamp import stamped, utc_now
from forge_station.mes.topics import STATUSES, STREAMS, TOPICS, MqttConfig, topic_of

HEADER_BYTES = 400
"""More than topic name and properties of a packet take besides the topic itself."""
HISTORICAL_S = 60.0
"""A row that is sent so long after it was made says so (`historical`)."""


def row_message(
    config: MqttConfig, row: Row, epoch: str, *, old_before: str, again: bool = False
) -> Outgoing:
    """A stored row with its delivery fields, the same bytes on every repeat.

    User properties are the CloudEvents attributes, with `epoch` and `seq`, and `historical` when
    the row is old news: sent again, or made before `old_before`. Raises ValueError for a body
    that is no JSON object.
    """
    body = stamped(
        row.body,
        id=row.id,
        stream=row.stream,
        epoch=epoch,
        seq=row.seq,
        streamSeq=row.stream_seq,
        bootId=row.boot_id,
    )
    properties = [
        ("id", row.id),
        *_attributes(config, row.stream),
        ("time", row.created_utc),
        ("epoch", epoch),
        ("seq", str(row.seq)),
    ]
    if again or row.created_utc < old_before:
        properties.append(("historical", "true"))
    return Outgoing(row.topic, body, properties=tuple(properties))


def old_before() -> str:
    """Rows made before it are old news."""
    return utc_now(-HISTORICAL_S)


def too_large(message: Outgoing, maximum_packet_bytes: int | None) -> bool:
    """Whether the broker, which named its limit at connect, would end the connection for it."""
    if maximum_packet_bytes is None:
        return False
    return len(message.body) + len(message.topic) + HEADER_BYTES > maximum_packet_bytes


def status_message(config: MqttConfig, name: str, fields: Mapping[str, Any]) -> Outgoing:
    """A status, retained as its topic says."""
    topic = TOPICS[name]
    body = payloads.status_body(name, config.root, fields)
    return Outgoing(
        topic_of(config, name), body, topic.qos, topic.retain, topic.expiry_s,
        properties=_attributes(config, name),
    )  # fmt: skip


def gone_message(
    config: MqttConfig,
    consumer: str,
    stream: str,
    epoch: str,
    *,
    ranges: Sequence[Sequence[int]] = (),
    begin: int | None = None,
) -> Outgoing:
    """Tells a consumer which numbers will not come, or where to begin."""
    fields: dict[str, Any] = {"stream": stream, "epoch": epoch, "consumer": consumer}
    if begin is not None:
        fields["begin"] = begin
    if ranges:
        fields["ranges"] = [list(item) for item in ranges]
    return status_message(config, "gone", fields)


def dead_letter_alarm(config: MqttConfig, row: Row, reason: int, text: str) -> payloads.Message:
    """Tells that a message was refused for good, by which reason code."""
    return payloads.alarm_message(
        "DEAD_LETTER",
        f"the broker refused a message of stream {row.stream}: {text}",
        config.root,
        severity=800,
        active=False,  # an event: nobody clears it
        params={"id": row.id, "seq": row.seq, "reason": reason},
    )


def conn_fields(outbox: Outbox, state: str) -> dict[str, Any]:
    """Of the `conn` status."""
    return {"state": state, "bootId": outbox.boot_id, "epoch": outbox.epoch}


def birth_fields(outbox: Outbox) -> dict[str, Any]:
    """Of the `birth` status, as far as outbox and interface know them."""
    lowest, following = outbox.span()
    return {
        "bootId": outbox.boot_id,
        "epoch": outbox.epoch,
        "firstSeqHeld": lowest,
        "nextSeq": following,
        "schemas": [TOPICS[item].schema for item in (*STREAMS, *STATUSES)],
        "previousShutdown": outbox.previous_shutdown,
    }


def _attributes(config: MqttConfig, kind: str) -> tuple[tuple[str, str], ...]:
    """The CloudEvents attributes that are the same for every message of a kind."""
    schema = TOPICS[kind].schema.replace("/", "-") if kind in TOPICS else f"{kind}-1.0"
    return (
        ("specversion", "1.0"),
        ("type", f"forge-station.{kind}"),
        ("source", config.root),
        ("dataschema", f"{schema}.json"),
    )
