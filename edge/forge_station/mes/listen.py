"""A consumer of the station's messages: prints what an MES would receive, and is one in tests.

It knows the topics and the schemas, nothing of the station's inside: it can run anywhere.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from forge_station.contract.error import ContractError
from forge_station.errors import LinkError
from forge_station.mes import schema
from forge_station.mes.link import SESSION_EXPIRY_S, equip
from forge_station.mes.topics import (
    MqttConfig,
    events_filter,
    jobs_filter,
    probe_topic,
    statuses_filter,
)
from forge_station.mes.tracking import Observation, Tracker

FEWER = 1
"""Exit code of a listener that did not get as many verdicts as it was asked to wait for."""
_FOR_PROGRAMS = ("schema", "source", "time", "schemas", "type", "bootId")


@dataclass(frozen=True)
class Received:
    """One message as it came. `fault` says why it could not be read; then `message` is empty."""

    topic: str
    body: bytes
    retained: bool
    message: Mapping[str, Any]
    kind: str
    """`verdict`, `grid`, `alarm`, `conn`, `birth`, `state`, `last`: the topic's last level; or
    `job`."""
    flow: Observation | None = None
    """Of events only: repeat, gap, filled gap, new epoch."""
    fault: str | None = None


class Listener:
    """`with Listener(config) as listener:` subscribes; `listener.next(5.0)` gives one message.

    It reconnects by itself. With `client_id` it is a consumer of record: the broker keeps what
    arrives while it is away (one hour). `filters`: topics in place of all that a station says.
    Repeats are delivered too, marked as such, unless
    `repeats` is False. Raises LinkError when the broker cannot be reached in `timeout_s`.
    """

    def __init__(
        self,
        config: MqttConfig,
        *,
        client_id: str | None = None,
        statuses: bool = True,
        filters: Sequence[str] | None = None,
        repeats: bool = False,
        timeout_s: float = 10.0,
    ) -> None:
        self._config = config
        self._client_id = client_id
        more = [statuses_filter(config), jobs_filter(config)] if statuses else []
        self._filters = [events_filter(config), *more] if filters is None else list(filters)
        self._jobs: dict[str, set[tuple[int, float | None]]] = {}
        self._repeats = repeats
        self._timeout_s = timeout_s
        self._arrived: queue.SimpleQueue[tuple[str, bytes, bool]] = queue.SimpleQueue()
        self._tracker = Tracker()
        self._subscribed = threading.Event()
        self._refusal: str | None = None
        self._client: mqtt.Client | None = None
        self.subscriptions = 0
        """Times that the subscription was granted: once a connection."""

    def __enter__(self) -> Listener:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect and wait until the subscription is granted."""
        where = f"{self._config.host}:{self._config.port}"
        client = self._client = self._new_client()
        try:
            if self._config.version == "5":
                properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
                properties.SessionExpiryInterval = SESSION_EXPIRY_S if self._client_id else 0
                client.connect(
                    self._config.host, self._config.port, self._config.keepalive_s,
                    clean_start=self._client_id is None, properties=properties,
                )  # fmt: skip
            else:
                client.connect(self._config.host, self._config.port, self._config.keepalive_s)
        except (OSError, ValueError) as error:
            raise LinkError("no connection to the broker", which=where, got=error) from error
        client.loop_start()
        if not self._subscribed.wait(self._timeout_s) or self._refusal:
            self.close()
            raise LinkError(
                "the broker does not let the listener subscribe",
                which=where,
                expected=f"a granted subscription in {self._timeout_s:g} s",
                got=self._refusal or "no answer",
            )

    def close(self) -> None:
        """Disconnect. May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.disconnect()
            with contextlib.suppress(AttributeError):  # paho 2.2: its thread has just ended itself
                client.loop_stop()

    def next(self, timeout_s: float) -> Received | None:
        """The next message, None when none came in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                arrived = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            received = self._read(*arrived)
            if self._repeats or not self._known(received):
                return received

    def _known(self, received: Received) -> bool:
        """An event that came before, or what a deployment has said already: each of its states goes
        out by itself, and the newest as a retained message as well."""
        if received.flow is not None:
            return received.flow.duplicate
        if received.kind != "job" or received.fault is not None:
            return False
        message = received.message
        said = (message["version"], message.get("progress"))
        seen = self._jobs.setdefault(received.topic, set())
        if said in seen:
            return True
        seen.add(said)
        return False

    def arrived(self, timeout_s: float) -> tuple[str, bytes, bool] | None:
        """The next message as topic, body, retained; neither read nor followed."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def publish(self, topic: str, body: bytes, *, retain: bool = False) -> bool:
        """Send a message, QoS 1; False when there is no connection, then it is not kept."""
        client = self._client
        if client is None or not client.is_connected():
            return False
        return client.publish(topic, body, 1, retain).rc == MQTTErrorCode.MQTT_ERR_SUCCESS

    def messages(self, idle_s: float) -> Iterator[Received]:
        """Messages until none came for `idle_s`."""
        while (received := self.next(idle_s)) is not None:
            yield received

    def missing(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """(source, stream) -> `streamSeq` numbers that have not come."""
        return self._tracker.missing()

    def _new_client(self) -> mqtt.Client:
        v5 = self._config.version == "5"
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            self._client_id or f"listen-{secrets.token_hex(4)}",
            clean_session=None if v5 else self._client_id is None,
            protocol=mqtt.MQTTv5 if v5 else mqtt.MQTTv311,
        )
        client.reconnect_delay_set(1, 1)
        equip(client, self._config)

        def on_connect(
            _: mqtt.Client, __: Any, ___: Any, reason: ReasonCode, ____: Properties | None
        ) -> None:
            if reason.is_failure:
                self._refusal = str(reason)
                self._subscribed.set()
            else:
                client.subscribe([(item, 1) for item in self._filters])

        def on_subscribe(
            _: mqtt.Client, __: Any, ___: int, reasons: list[ReasonCode], ____: Any
        ) -> None:
            refused = [str(item) for item in reasons if item.is_failure]
            self._refusal = ", ".join(refused) or None
            self.subscriptions += not refused
            self._subscribed.set()

        def on_message(_: mqtt.Client, __: Any, message: mqtt.MQTTMessage) -> None:
            if message.topic != probe_topic(self._config):
                self._arrived.put((message.topic, bytes(message.payload), message.retain))

        client.on_connect = on_connect
        client.on_subscribe = on_subscribe
        client.on_message = on_message
        return client

    def _read(self, topic: str, body: bytes, retained: bool) -> Received:
        *_, above, kind = topic.split("/")
        kind = "job" if above == "job" else kind
        try:
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            schema.require(message)
        except (ValueError, RecursionError, ContractError) as error:
            return Received(topic, body, retained, {}, kind, fault=str(error))
        flow = self._tracker.observe(message) if "streamSeq" in message else None
        return Received(topic, body, retained, message, kind, flow)


def line_of(received: Received) -> str:
    """One readable line (more after a gap) for a person."""
    if received.fault is not None:
        return f"UNREADABLE {received.topic}: {received.fault}"
    message = received.message
    time_of_day = str(message["time"])[11:23]
    lines = _flow_lines(received, time_of_day)
    if received.kind == "verdict":
        lines.append(f"{time_of_day} {_verdict_text(message)}")
    elif received.kind == "grid":
        marked = [_view_text(view) for view in message["views"] if view["cells"]]
        text = " | ".join(marked) or "no cell"
        lines.append(f"{time_of_day} GRID    part {message.get('partId', '?')}  {text}")
    elif received.kind == "alarm":
        state = "" if message["active"] else " (gone)"
        lines.append(f"{time_of_day} ALARM   {message['code']}{state}  {message['text']}")
    elif received.kind == "job":
        lines.append(f"{time_of_day} JOB     {_job_text(message)}")
    elif received.kind == "audit":
        who = message.get("keyName", "nobody known")
        told = f"{message['action']} {message['outcome']} for {who}"
        lines.append(f"{time_of_day} AUDIT   {told}: {message['detail']}")
    else:
        rest = {
            key: value
            for key, value in message.items()
            if key not in _FOR_PROGRAMS and not isinstance(value, dict)
        }
        text = "  ".join(f"{key}={value}" for key, value in rest.items())
        lines.append(f"{time_of_day} {received.kind:<7} {text}")
    return "\n".join(lines)


def run(
    config: MqttConfig,
    out: TextIO,
    *,
    as_json: bool = False,
    count: int | None = None,
    idle_s: float | None = None,
) -> int:
    """`forge-station listen`: print messages until `count` verdicts came, or nothing for `idle_s`.

    `as_json` prints the raw bodies, one a line, repeats included, nothing else. The exit code, see
    `ended`.
    """
    verdicts = 0
    with Listener(config, repeats=as_json, statuses=not as_json) as listener:
        while count is None or verdicts < count:
            received = listener.next(idle_s if idle_s is not None else 3600.0)
            if received is None:
                if idle_s is not None:
                    break
                continue
            text = received.body.decode(errors="replace") if as_json else line_of(received)
            print(text, file=out, flush=True)
            verdicts += received.kind == "verdict" and received.fault is None
    return ended(verdicts, count)


def ended(verdicts: int, count: int | None) -> int:
    """The exit code of a listener: 0; 1, and a line on stderr, when fewer than asked for came."""
    if count is None or verdicts >= count:
        return 0
    print(f"forge-station: {verdicts} of {count} verdicts came", file=sys.stderr)
    return FEWER


def _flow_lines(received: Received, time_of_day: str) -> list[str]:
    flow = received.flow
    if flow is None:
        return []
    stream = received.message["stream"]
    lines = []
    if flow.new_epoch:
        lines.append(f"{time_of_day} NEW EPOCH of {stream}: the station's outbox was begun anew")
    if flow.missing:
        first, last = flow.missing[0], flow.missing[-1]
        numbers = f"{first}" if first == last else f"{first} to {last}"
        lines.append(f"{time_of_day} GAP     {stream} {numbers} did not come")
    if flow.filled:
        number = received.message["streamSeq"]
        lines.append(f"{time_of_day} LATE    {stream} {number}, missing until now")
    return lines


def _job_text(message: Mapping[str, Any]) -> str:
    model = message.get("model", {})
    release = f"{model['name']} release {model['releaseCounter']}" if model else ""
    share = f"{100 * message['progress']:.0f} %" if "progress" in message else ""
    counted = [
        f"{name} " + ", ".join(f"{value} {key}" for key, value in message[name].items())
        for name in ("shadow", "trial")
        if name in message
    ]
    end = ": ".join(message[key] for key in ("code", "detail") if key in message)
    state = f"{message['state']} ({message['version']})"
    told = [message["jobId"], f"{state} {share}".rstrip(), release, *counted, end]
    return "  ".join(item for item in told if item)


def _verdict_text(message: Mapping[str, Any]) -> str:
    parts = [f"{item['mark']} {item['part']}" for item in message.get("parts", ())]
    reasons = [
        item["code"] + (f" at {item['mark']}" if "mark" in item else "")
        for item in message["reasons"]
    ]
    grid = message.get("grid", {})
    marked = [_view_text(view) for view in grid.get("views", ()) if _count(view)]
    fields = [
        f"{message['verdict']:<7} #{message['seq']} part {message['partId']}",
        message["productId"],
        ", ".join(parts),
        ", ".join(reasons),
        " | ".join(marked),
        "simulated" if message["isSimulated"] else "",
    ]
    return "  ".join(item for item in fields if item)


def _count(view: Mapping[str, Any]) -> int:
    return int(view.get("count", len(view.get("cells", ()))))


def _view_text(view: Mapping[str, Any]) -> str:
    cells = view.get("cells")
    if not cells:
        return f"{view['mark']} {view['view']}: {_count(view)} cells"
    rows: dict[int, list[str]] = {}
    for row, column, *_ in cells:
        rows.setdefault(row, []).append(str(column))
    text = " ".join(f"r{row}: {','.join(columns)}" for row, columns in sorted(rows.items()))
    return f"{view['mark']} {view['view']} {text}"
