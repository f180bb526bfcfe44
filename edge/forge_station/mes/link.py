"""One MQTT connection, from connect to its end. It never reconnects: a new one is a new `Link`.

It knows no outbox and decides nothing: what the broker says becomes an event. With paho 2.2 the
callbacks run in its network thread, some with its locks held, so they only call `emit`, which must
only queue. An error inside a callback would end that thread without a word, see `alive`.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from forge_station.errors import LinkError
from forge_station.mes import credentials
from forge_station.mes.topics import MqttConfig, probe_topic

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
SESSION_EXPIRY_S = 3600
WILL_DELAY_S = 5
"""A station that is back within it was never away, as far as the will is concerned."""
INBOUND_BYTES = 2_000_000
"""The broker sends the station nothing larger (MQTT 5)."""
WINDOW = 20
"""Most messages on their way at once; a broker may demand fewer."""

NO_SUBSCRIBERS = 0x10
UNSUPPORTED_VERSION = 0x84
TAKEN_OVER = 0x8E


@dataclass(frozen=True)
class Acknowledged:
    """PUBACK: the broker's answer to the publish with this packet id."""

    packet: int
    reason: int
    text: str


@dataclass(frozen=True)
class Down:
    """The connection ended. `reason` is the code of a DISCONNECT from the broker, else None."""

    reason: int | None
    text: str


@dataclass(frozen=True)
class Inbound:
    """A message on a topic that was subscribed to. Who sent it is not known: trust nothing in it.

    `retained`: it was published to stay at the broker (with MQTT 3.1.1 seen only when it comes from
    there). `response_topic` and `correlation` are of MQTT 5.
    """

    topic: str
    body: bytes
    retained: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None


Event = Acknowledged | Down | Inbound
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Outgoing:
    """One message to publish. `properties` become MQTT 5 user properties."""

    topic: str
    body: bytes
    qos: int = 1
    retain: bool = False
    expiry_s: int | None = None
    properties: tuple[tuple[str, str], ...] = ()
    correlation: bytes | None = None
    """Of the request that this message answers (MQTT 5)."""


class Link:
    """A live connection; get one from `connect`. `close` says good-bye, `drop` does not."""

    def __init__(
        self, client: mqtt.Client, thread: threading.Thread, version: str, accepted: _Accepted
    ) -> None:
        self._client = client
        self._thread = thread
        self._version = version
        self.session_present = accepted.session_present
        self.window = max(1, min(WINDOW, accepted.receive_maximum))
        self.maximum_packet_bytes = accepted.maximum_packet_bytes

    def publish(self, message: Outgoing) -> int:
        """Hand a message to the network thread; the packet id to recognise its answer by.

        Raises LinkError when the connection is already gone. The message is then not kept.
        """
        properties = None
        if self._version == "5":
            properties = _PublishProperties(message)
        info = self._client.publish(
            message.topic, message.body, message.qos, message.retain, properties
        )
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise LinkError("the connection to the broker is gone", got=info.rc.name)
        return info.mid

    def subscribe(self, filters: Sequence[str], *, as_published: bool = True) -> None:
        """Ask for the messages of these topic filters, QoS 1; they come as `Inbound` events.

        The station never gets its own messages. `as_published`: it sees which were published as
        retained; else which come from the broker's memory (all that MQTT 3.1.1 can tell).
        """
        if not filters:
            return
        if self._version == "5":
            options = SubscribeOptions(qos=1, noLocal=True, retainAsPublished=as_published)
            code, _ = self._client.subscribe([(item, options) for item in filters])
        else:
            code, _ = self._client.subscribe([(item, 1) for item in filters])
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise LinkError("the connection to the broker is gone", got=code.name)

    @property
    def alive(self) -> bool:
        """Whether paho believes in the connection and its network thread still runs."""
        return self._client.is_connected() and self._thread.is_alive()

    def close(self) -> None:
        """Send DISCONNECT, so that the broker forgets the will, and end."""
        self._client.disconnect()
        self._thread.join(1.0)
        end(self._client, self._thread)

    def drop(self) -> None:
        """End without DISCONNECT: the broker publishes the will after its delay."""
        end(self._client, self._thread)


@dataclass(frozen=True)
class _Accepted:
    session_present: bool
    receive_maximum: int = WINDOW
    maximum_packet_bytes: int | None = None


def connect(config: MqttConfig, will: Outgoing, emit: Emit) -> Link:
    """Connect and wait for the broker's consent, 5 s at most for each of the two.

    With MQTT 3.1.1, where a refused message is confirmed like any other, a probe must come back
    before anything is sent. Raises LinkError with what to do when the broker cannot be reached or
    refuses.
    """
    where = f"{config.host}:{config.port}"
    credentials.require(config)
    client = _client(config, will)
    answered: list[_Accepted | LinkError] = []
    ready = threading.Event()
    probe, probed = secrets.token_hex(8).encode(), threading.Event()

    def on_connect(
        _: mqtt.Client, __: Any, flags: mqtt.ConnectFlags, reason: ReasonCode,
        properties: Properties | None,
    ) -> None:  # fmt: skip
        if reason.is_failure:
            answered.append(_refused(where, reason, config))
        else:
            answered.append(
                _Accepted(
                    flags.session_present,
                    getattr(properties, "ReceiveMaximum", WINDOW),
                    getattr(properties, "MaximumPacketSize", None),
                )
            )
        ready.set()

    def on_disconnect(
        _: mqtt.Client, __: Any, flags: mqtt.DisconnectFlags, reason: ReasonCode, ___: Any
    ) -> None:
        by_broker = flags.is_disconnect_packet_from_server
        text = f"{'broker' if by_broker else 'network'}: {reason}"
        if not answered:
            answered.append(_unanswered(where, text, config))
            ready.set()
        emit(Down(reason.value if by_broker else None, text))

    def on_publish(_: mqtt.Client, __: Any, packet: int, reason: ReasonCode, ___: Any) -> None:
        emit(Acknowledged(packet, reason.value, str(reason) if reason.value else ""))

    def on_subscribe(
        _: mqtt.Client, __: Any, ___: int, reasons: list[ReasonCode], ____: Any
    ) -> None:
        refused = [str(reason) for reason in reasons if reason.is_failure]
        if refused:
            log.error("mqtt: the broker refuses a subscription: %s", ", ".join(refused))

    def on_message(_: mqtt.Client, __: Any, message: mqtt.MQTTMessage) -> None:
        if message.topic == probe_topic(config):
            if bytes(message.payload) == probe:
                probed.set()
            return
        given = message.properties
        emit(
            Inbound(
                message.topic,
                bytes(message.payload),
                bool(message.retain),
                getattr(given, "ResponseTopic", None),
                getattr(given, "CorrelationData", None),
            )
        )

    client.on_connect = on_connect
    client.on_disconnect = on_disconnect
    client.on_publish = on_publish
    client.on_subscribe = on_subscribe
    client.on_message = on_message
    try:
        if config.version == "5":
            properties = _properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = SESSION_EXPIRY_S
            properties.ReceiveMaximum = WINDOW
            properties.MaximumPacketSize = INBOUND_BYTES
            client.connect(
                config.host, config.port, config.keepalive_s,
                clean_start=False, properties=properties,
            )  # fmt: skip
        else:
            client.connect(config.host, config.port, config.keepalive_s)
    except (OSError, ValueError) as error:
        raise _unreached(where, error) from error
    threads = set(threading.enumerate())
    client.loop_start()
    thread = next(
        (
            item
            for item in threading.enumerate()
            if item not in threads and item.name.endswith(f"-{config.station}")
        ),
        threading.Thread(),  # it has ended already: the broker hung up at once
    )
    if not ready.wait(CONNECT_TIMEOUT_S):
        answered.append(_unanswered(where, f"nothing in {CONNECT_TIMEOUT_S:g} s", config))
    answer = answered[0]
    if isinstance(answer, LinkError):
        end(client, thread)
        raise answer
    if config.version == "3.1.1":
        client.subscribe(probe_topic(config), 1)
        client.publish(probe_topic(config), probe, 1)
        if not probed.wait(CONNECT_TIMEOUT_S):
            end(client, thread)
            raise _unprobed(where, config)
        client.unsubscribe(probe_topic(config))
    return Link(client, thread, config.version, answer)


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a subscription to the filter receives the topic."""
    return mqtt.topic_matches_sub(topic_filter, topic)


class _PublishProperties(Properties):
    """The properties of one PUBLISH as bytes (MQTT 5, 2.2.2).

    paho composes them by name, through lists of all properties: 0.1 ms of CPU a message.
    """

    def __init__(self, message: Outgoing) -> None:
        content = [b"\x01\x01", b"\x03", _text("application/json")]
        if message.expiry_s is not None:
            content += [b"\x02", message.expiry_s.to_bytes(4, "big")]
        if message.correlation is not None:
            content += [b"\x09", len(message.correlation).to_bytes(2, "big"), message.correlation]
        for name, value in message.properties:
            content += [b"\x26", _text(name), _text(value)]
        packed = b"".join(content)
        # Past the checks of paho's __setattr__, which go by its own names.
        self.__dict__["packetType"] = PacketTypes.PUBLISH
        self.__dict__["packed"] = _variable_length(len(packed)) + packed

    def pack(self) -> bytes:
        """What paho puts on the wire."""
        packed: bytes = self.__dict__["packed"]
        return packed


def _text(value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > 65_535:
        raise ValueError(f"a property of {len(encoded)} bytes")
    return len(encoded).to_bytes(2, "big") + encoded


def _variable_length(value: int) -> bytes:
    """MQTT 5, 1.5.5."""
    found = bytearray()
    while True:
        value, digit = divmod(value, 128)
        found.append(digit | (128 if value else 0))
        if not value:
            return bytes(found)


def _properties(packet_type: int) -> Properties:
    return Properties(packet_type)  # type: ignore[no-untyped-call]


def _client(config: MqttConfig, will: Outgoing) -> mqtt.Client:
    protocol = mqtt.MQTTv5 if config.version == "5" else mqtt.MQTTv311
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        config.station,
        clean_session=None if config.version == "5" else False,
        protocol=protocol,
        reconnect_on_failure=False,
    )
    client.max_inflight_messages_set(WINDOW)
    client.connect_timeout = CONNECT_TIMEOUT_S
    equip(client, config)
    properties = None
    if config.version == "5":
        properties = _properties(PacketTypes.WILLMESSAGE)
        properties.WillDelayInterval = WILL_DELAY_S
        properties.ContentType = "application/json"
        properties.PayloadFormatIndicator = 1
    client.will_set(will.topic, will.body, will.qos, will.retain, properties)
    return client


def equip(client: mqtt.Client, config: MqttConfig) -> None:
    """What every client of ours gets before it connects: the account, TLS, no waiting to send.

    Raises LinkError for files that cannot be read.
    """
    client.on_socket_open = _send_at_once
    if config.username is not None:
        client.username_pw_set(config.username, password_of(config))
    if config.tls:
        client.tls_set_context(tls_context(config))


def _send_at_once(_: mqtt.Client, __: Any, connection: Any) -> None:
    """For `on_socket_open`: a short message does not wait for what was sent before it.

    With Nagle's algorithm the last of three messages waited 40 ms for the broker's delayed ACK.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def password_of(config: MqttConfig) -> str | None:
    """The content of the password file without its line end."""
    if config.password_file is None:
        return None
    try:
        return config.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LinkError(
            "the password file cannot be read", which=config.password_file, got=error
        ) from error


def tls_context(config: MqttConfig) -> ssl.SSLContext:
    """Certificate and host name are checked; TLS 1.2 at least."""
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.tls_cert is not None and config.tls_key is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        raise LinkError(
            "the TLS certificates cannot be loaded",
            which=f"ca {config.tls_ca}, cert {config.tls_cert}, key {config.tls_key}",
            got=error,
        ) from error
    return context


def _refused(where: str, reason: ReasonCode, config: MqttConfig) -> LinkError:
    action = "check the user name, the password and the broker's access rules"
    if reason.value == UNSUPPORTED_VERSION:
        action = "the broker has no MQTT 5: set mqtt.version to '3.1.1' if it must be used"
    return LinkError(
        "the broker refuses the station",
        which=f"{where}, client id {config.station}",
        got=reason,
        action=action,
    )


def _unanswered(where: str, got: str, config: MqttConfig) -> LinkError:
    return LinkError(
        "the broker does not answer CONNECT",
        which=where,
        got=got,
        action=f"check that this is an MQTT port and that the broker knows MQTT {config.version};"
        " a broker without MQTT 5 needs mqtt.version: '3.1.1'",
    )


def _unprobed(where: str, config: MqttConfig) -> LinkError:
    """MQTT 3.1.1 confirms what it refuses: without this the station would lose in silence."""
    return LinkError(
        "the broker confirms messages but does not deliver them",
        which=f"{where}, MQTT 3.1.1, topic {probe_topic(config)}",
        expected=f"the station's own probe within {CONNECT_TIMEOUT_S:g} s",
        got="nothing",
        action="allow the station to write evt/# and to read evt/probe, or use MQTT 5, which"
        " reports refusals",
    )


def _unreached(where: str, error: object) -> LinkError:
    return LinkError("no connection to the broker", which=where, got=error)


def end(client: mqtt.Client, thread: threading.Thread) -> None:
    """Shut the socket, so that the network thread ends whatever it waits for, and wait for it.

    paho's own `loop_stop` would wait for messages that are never going to be answered.
    """
    connection = client.socket()
    if isinstance(connection, socket.socket):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("mqtt: the socket was closed already")
    if thread.ident is not None:
        thread.join(3.0)
    if thread.is_alive():
        log.error("mqtt: the network thread of an ended connection does not stop")
    else:
        client.loop_stop()
