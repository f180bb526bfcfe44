"""The connection's small print: what a broker says at connect, and what goes on the wire."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from forge_station.errors import LinkError
from forge_station.mes import link
from forge_station.mes.link import WINDOW, Outgoing
from forge_station.mes.takeover import CHECK_S, Takeover
from forge_station.mes.topics import MqttConfig

WILL = Outgoing("e/will", b"{}", 1, retain=True)


@contextmanager
def a_broker_that_says(connack: bytes) -> Iterator[int]:
    """A port that answers CONNECT with these bytes and then only listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(10_000)
                connection.sendall(connack)
                while connection.recv(10_000):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.close()
        thread.join(5.0)


def connack(properties: bytes, reason: int = 0) -> bytes:
    body = bytes([0, reason, len(properties)]) + properties
    return b"\x20" + bytes([len(body)]) + body


@pytest.mark.parametrize(
    ("properties", "window", "packet"),
    [
        (b"", WINDOW, None),
        (b"\x21" + struct.pack(">H", 3), 3, None),
        (b"\x21" + struct.pack(">H", 60_000), WINDOW, None),
        (b"\x27" + struct.pack(">I", 2_000), WINDOW, 2_000),
    ],
)
def test_limits_of_the_broker_are_read_from_its_connack(
    properties: bytes, window: int, packet: int | None
) -> None:
    with a_broker_that_says(connack(properties)) as port:
        found = link.connect(MqttConfig(port=port), WILL, lambda _: None)
        assert (found.window, found.maximum_packet_bytes) == (window, packet)
        assert found.alive
        found.drop()


def test_a_message_does_not_wait_for_the_one_before_it() -> None:
    with a_broker_that_says(connack(b"")) as port:
        found = link.connect(MqttConfig(port=port), WILL, lambda _: None)
        connection = found._client.socket()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        found.drop()


@pytest.mark.parametrize(
    ("reason", "text"),
    [(0x84, "has no MQTT 5"), (0x87, "access rules"), (0x86, "the password")],
)
def test_refusal_says_what_to_do(reason: int, text: str) -> None:
    with (
        a_broker_that_says(connack(b"", reason)) as port,
        pytest.raises(LinkError, match=text),
    ):
        link.connect(MqttConfig(port=port), WILL, lambda _: None)


text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=200)


@given(
    pairs=st.lists(st.tuples(text, text), max_size=8),
    expiry_s=st.none() | st.integers(0, 2**32 - 1),
    correlation=st.none() | st.binary(max_size=300),
)
def test_properties_packed_by_hand_are_those_that_paho_reads(
    pairs: list[tuple[str, str]], expiry_s: int | None, correlation: bytes | None
) -> None:
    message = Outgoing(
        "t", b"", properties=tuple(pairs), expiry_s=expiry_s, correlation=correlation
    )
    packed = link._PublishProperties(message).pack()
    read = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    _, length = read.unpack(packed)  # type: ignore[no-untyped-call]
    assert length == len(packed)
    assert read.ContentType == "application/json"
    assert read.PayloadFormatIndicator == 1
    assert getattr(read, "UserProperty", []) == pairs
    assert getattr(read, "MessageExpiryInterval", None) == expiry_s
    assert getattr(read, "CorrelationData", None) == correlation


def test_property_too_long_for_the_wire_is_an_error() -> None:
    with pytest.raises(ValueError, match="70000 bytes"):
        link._PublishProperties(Outgoing("t", b"", properties=(("id", "x" * 70_000),)))


# Another client with the station's id

OURS, THEIRS = b'{"state":"ONLINE","bootId":"aaaaaaaa"}', b'{"state":"ONLINE","bootId":"bbbbbbbb"}'


@pytest.mark.parametrize(
    ("body", "retained", "again", "taken"),
    [
        (THEIRS, True, True, True),
        (THEIRS, False, True, False),
        (THEIRS, True, False, False),  # the first connection: it may be this station's last run
        (OURS, True, True, False),
        (b'{"state":"CONNECTIONBROKEN","bootId":"bbbbbbbb"}', True, True, False),
        (b"\xff", True, True, False),
        (b"[]", True, True, False),
        (b"{}", True, True, False),
    ],
)
def test_another_ones_retained_online_tells_a_takeover(
    body: bytes, retained: bool, again: bool, taken: bool
) -> None:
    takeover = Takeover("aaaaaaaa")
    takeover.connected(10.0, again=again)
    assert takeover.may_speak(10.0) is not again  # it must not overwrite what it has yet to read
    assert takeover.heard(body, retained=retained) is taken
    assert takeover.may_speak(10.0 + CHECK_S) is not taken  # the other one would hear it and wait
    takeover.connected(20.0, again=True)
    assert takeover.may_speak(20.0 + CHECK_S)


def test_waits_of_a_station_that_was_thrown_out_grow_and_end() -> None:
    takeover = Takeover("aaaaaaaa")
    waits = []
    for _ in range(6):
        takeover.ended(taken_over=True, lasted=False)
        waits.append(takeover.wait_s(60.0))
    assert waits == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    takeover.ended(taken_over=False, lasted=False)
    assert takeover.active
    takeover.ended(taken_over=False, lasted=True)
    assert not takeover.active
