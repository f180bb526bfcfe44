"""The MQTT session of the Sparkplug mirror: MQTT 3.1.1, clean, its will an NDEATH.

3.1.1 because every Sparkplug host and broker has it and Sparkplug uses nothing of 5. It shares the
security settings and the rules of `link`: a session never reconnects, and callbacks only `emit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from forge_station.errors import LinkError
from forge_station.mes.link import (
    CONNECT_TIMEOUT_S,
    Down,
    Event,
    Inbound,
    end,
    equip,
)
from forge_station.mes.topics import MqttConfig

DEATH_TIMEOUT_S = 1.0


class Session:
    """A live connection; get one from `connect`."""

    def __init__(
        self, client: mqtt.Client, thread: threading.Thread, granted: threading.Event
    ) -> None:
        self._client = client
        self._thread = thread
        self._granted = granted

    def subscribe(self, filters: tuple[str, ...]) -> None:
        """Subscribe with QoS 1 and wait until the broker has agreed. Raises LinkError."""
        code, _ = self._client.subscribe([(item, 1) for item in filters])
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or not self._granted.wait(CONNECT_TIMEOUT_S):
            raise LinkError("the broker does not confirm the subscription", which=filters)

    def publish(self, topic: str, body: bytes, qos: int = 0) -> None:
        """Hand a message to the network thread; with QoS 1 wait for its answer, 1 s at most."""
        sent = self._client.publish(topic, body, qos, retain=False)
        if sent.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            raise LinkError("the connection to the broker is gone", got=sent.rc.name)
        if qos:
            try:
                sent.wait_for_publish(DEATH_TIMEOUT_S)
            except (RuntimeError, ValueError) as error:
                raise LinkError("the connection to the broker is gone", got=error) from error

    @property
    def alive(self) -> bool:
        return self._client.is_connected() and self._thread.is_alive()

    def close(self) -> None:
        """Send DISCONNECT: the broker forgets the will."""
        self._client.disconnect()
        self._thread.join(1.0)
        end(self._client, self._thread)

    def drop(self) -> None:
        """End without a word: the broker publishes the will."""
        end(self._client, self._thread)


def connect(
    config: MqttConfig,
    client_id: str,
    will_topic: str,
    will_body: bytes,
    emit: Callable[[Event], None],
) -> Session:
    """Connect and wait for the broker's consent. Raises LinkError."""
    where = f"{config.host}:{config.port}, client id {client_id}"
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=True,
        protocol=mqtt.MQTTv311,
        reconnect_on_failure=False,
    )
    client.connect_timeout = CONNECT_TIMEOUT_S
    equip(client, config)
    client.will_set(will_topic, will_body, 1, retain=False)
    answers: list[str | None] = []
    answered, granted = threading.Event(), threading.Event()

    def on_connect(_: Any, __: Any, ___: Any, reason: ReasonCode, ____: Any) -> None:
        answers.append(str(reason) if reason.is_failure else None)
        answered.set()

    def on_disconnect(_: Any, __: Any, ___: Any, reason: ReasonCode, ____: Any) -> None:
        answers.append(str(reason))
        answered.set()
        emit(Down(None, str(reason)))

    def on_subscribe(_: Any, __: Any, ___: int, reasons: list[ReasonCode], ____: Any) -> None:
        if not any(reason.is_failure for reason in reasons):
            granted.set()

    def on_message(_: Any, __: Any, message: mqtt.MQTTMessage) -> None:
        emit(Inbound(message.topic, bytes(message.payload), bool(message.retain)))

    client.on_connect = on_connect
    client.on_disconnect = on_disconnect
    client.on_subscribe = on_subscribe
    client.on_message = on_message
    try:
        client.connect(config.host, config.port, config.keepalive_s)
    except (OSError, ValueError) as error:
        raise LinkError("no connection to the broker", which=where, got=error) from error
    before = set(threading.enumerate())
    client.loop_start()
    thread = next(
        (item for item in threading.enumerate() if item not in before and client_id in item.name),
        threading.Thread(),
    )
    answered.wait(CONNECT_TIMEOUT_S)
    refusal = answers[0] if answers else f"no answer in {CONNECT_TIMEOUT_S:g} s"
    if refusal is not None:
        end(client, thread)
        raise LinkError("the broker refuses the Sparkplug session", which=where, got=refusal)
    return Session(client, thread, granted)
