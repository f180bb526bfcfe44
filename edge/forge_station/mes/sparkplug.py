"""Mirrors the station into Sparkplug B 3.0, for SCADA and MES hosts that speak it.

A mirror only: its data messages are QoS 0, so what a host misses is gone. The record is the
outbox and `evt/verdict`. It has an MQTT connection of its own, because the will of it must be
NDEATH, and reads nothing but rebirth requests and the state of its primary host.

While nobody can hear it (no broker, primary host offline) verdicts are held, the newest `keep` of
them, and sent as historical right after the next birth. `docs/SPARKPLUG_OPCUA.md` is for people.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from forge_station.errors import InputError, LinkError
from forge_station.mes import sparkplug_link, state_file
from forge_station.mes.link import Down, Event, Inbound
from forge_station.mes.settings import NAMESPACE, SparkplugConfig
from forge_station.mes.sparkplug_node import (
    REBIRTH,
    VERDICT_METRICS,
    Node,
    Result,
    result_of,
)
from forge_station.mes.sparkplug_payload import decode
from forge_station.mes.topics import MqttConfig

log = logging.getLogger(__name__)

REBIRTH_PAUSE_S = 1.0
"""Rebirth requests within it after a birth are answered together at its end: no storm of births
when several hosts start at once."""
RECONNECT_S = (1.0, 30.0)
COUNTED = ("PASS", "FAIL", "UNSURE", "ERROR")


class Connection(Protocol):
    """What is needed of `sparkplug_link.Session`."""

    def subscribe(self, filters: tuple[str, ...]) -> None: ...
    def publish(self, topic: str, body: bytes, qos: int = 0) -> None: ...
    @property
    def alive(self) -> bool: ...
    def close(self) -> None: ...
    def drop(self) -> None: ...


Connect = Callable[[MqttConfig, str, str, bytes, Callable[[Event], None]], Connection]
"""(config, client id, topic of the will, its body, emit) -> a live connection."""


class Mirror:
    """A context manager; `verdict` and `update` return at once, whatever the broker does.

    `state_path` keeps bdSeq over a restart.
    """

    def __init__(
        self,
        config: MqttConfig,
        sparkplug: SparkplugConfig,
        state_path: Path,
        values: Mapping[str, Any] | None = None,
        *,
        connect: Connect = sparkplug_link.connect,
        reconnect_s: tuple[float, float] = RECONNECT_S,
    ) -> None:
        self._config = config
        self._sparkplug = sparkplug
        self._state_path = state_path
        self._connect = connect
        self._reconnect_s = reconnect_s
        self._id = sparkplug.node or config.station
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {f"Counters/{name}": 0 for name in ("Total", *COUNTED)}
        self._values.update(values or {})
        self._held: deque[Result] = deque(maxlen=sparkplug.keep)
        self._lost = 0
        self._events: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
        self._generation = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._host_online: int | None = None
        self._births = 0
        self._born = False
        self._error: str | None = None

    def __enter__(self) -> Mirror:
        self._thread = threading.Thread(target=self._run, name="sparkplug", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._events.put(None)
        if self._thread is not None:
            self._thread.join()

    @property
    def born(self) -> bool:
        """Whether a host can hear the station now."""
        return self._born

    @property
    def births(self) -> int:
        """NBIRTHs since the start."""
        return self._births

    @property
    def held(self) -> int:
        """Verdicts that are not sent yet."""
        return len(self._held)

    @property
    def lost(self) -> int:
        """Verdicts that were given up because more than `keep` were held."""
        return self._lost

    def verdict(self, verdict: Mapping[str, Any]) -> None:
        """Mirror one result (`Verdict.to_dict()`)."""
        result = result_of(verdict)
        with self._lock:
            self._values["Counters/Total"] += 1
            self._values[f"Counters/{verdict['outcome']}"] += 1
            self._lost += len(self._held) == self._held.maxlen
            self._held.append(result)
        self._events.put(None)

    def update(self, values: Mapping[str, Any]) -> None:
        """Set metrics of `sparkplug_node.DEFINITIONS` by name; only changes are sent."""
        with self._lock:
            self._values.update(values)
        self._events.put(None)

    # The one thread

    def _run(self) -> None:
        first_s, longest_s = self._reconnect_s
        delay_s = first_s
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._session()
            except LinkError as error:
                if str(error) != self._error:
                    log.warning("sparkplug: %s", error)
                self._error = str(error)
            except Exception:  # a fault of ours must not end the mirror for good
                log.exception("sparkplug: the mirror has failed and begins a new session")
            self._born = False
            delay_s = first_s if time.monotonic() - began > 5.0 else min(longest_s, 2 * delay_s)
            self._stop.wait(random.uniform(delay_s / 2, delay_s))

    def _session(self) -> None:
        """One MQTT session, from CONNECT to its end. Raises LinkError when it breaks."""
        self._generation += 1
        generation = self._generation
        bd_seq = self._next_bd_seq()
        with self._lock:
            types = self._sparkplug.datatypes
            node = Node(self._sparkplug.group, self._id, bd_seq, self._values, types=types)
        session = self._connect(
            self._config,
            f"{self._config.station}-sparkplug",
            node.topic("NDEATH"),
            node.death(),
            lambda event: self._events.put((generation, event)),
        )
        try:
            filters = [node.topic("NCMD")]
            if self._sparkplug.primary_host:
                filters.append(f"{NAMESPACE}/STATE/{self._sparkplug.primary_host}")
            session.subscribe(tuple(filters))
            self._error = None
            self._serve(session, node)
            if self._born:
                session.publish(node.topic("NDEATH"), node.death(), 1)
        except BaseException:
            session.drop()
            raise
        session.close()

    def _serve(self, session: Connection, node: Node) -> None:
        """Until the mirror is closed, or a primary host goes offline after the birth."""
        must_wait = self._sparkplug.primary_host is not None
        self._host_online, self._born = None, False
        online = not must_wait
        wanted, born_at = True, float("-inf")
        while not self._stop.is_set():
            pause_s = born_at + REBIRTH_PAUSE_S - time.monotonic()
            if online and wanted and pause_s <= 0:
                self._bear(session, node)
                wanted, born_at = False, time.monotonic()
            elif self._born and not wanted:
                self._send(session, node)
            for event in self._wait(pause_s if wanted and pause_s > 0 else 1.0):
                if isinstance(event, Down):
                    raise LinkError("the connection has ended", got=event.text)
                if not isinstance(event, Inbound):
                    continue
                if event.topic == node.topic("NCMD"):
                    wanted = wanted or _asks_rebirth(event)
                elif must_wait:
                    online = self._heard(event, online)
            if self._born and not online:
                log.warning("sparkplug: host %s is offline", self._sparkplug.primary_host)
                return
            if not session.alive:
                raise LinkError("the connection has ended", got="the network thread has stopped")

    def _bear(self, session: Connection, node: Node) -> None:
        """NBIRTH with the present values; then what nobody could hear, as historical."""
        again = self._born
        with self._lock:
            held = [] if again else list(self._held)
            node.update(self._values)
            if held:
                node.update(held[-1].values, held[-1].timestamp)
        session.publish(node.topic("NBIRTH"), node.birth())
        self._born = True
        self._births += 1
        for result in held:
            session.publish(node.topic("NDATA"), node.history(result))
            self._sent(result)

    def _send(self, session: Connection, node: Node) -> None:
        """What has changed since; each verdict in a message of its own."""
        while True:
            with self._lock:
                result = self._held[0] if self._held else None
                changed = node.update(self._values)
            if result is not None:
                changed |= node.update(result.values, result.timestamp)
            if changed:
                session.publish(node.topic("NDATA"), node.data(changed))
            if result is None:
                return
            self._sent(result)

    def _sent(self, result: Result) -> None:
        with self._lock:
            if self._held and self._held[0] is result:
                self._held.popleft()
            self._values.update({name: result.values[name] for name in VERDICT_METRICS})

    def _heard(self, event: Inbound, online: bool) -> bool:
        """Whether the primary host is online after this STATE message."""
        try:
            facts = json.loads(event.body)
            claimed, when = facts["online"], facts["timestamp"]
            if not isinstance(claimed, bool) or not isinstance(when, int):
                raise ValueError("online is no boolean, or timestamp no number")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("sparkplug: STATE of the host cannot be read: %s", error)
            return online
        if self._host_online is not None and when < self._host_online:
            return online  # of an earlier session of the host
        self._host_online = when
        return claimed

    def _wait(self, timeout_s: float) -> list[Event]:
        """The events of this session; empty when only something is to be sent."""
        found: list[tuple[int, Event] | None] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        return [item[1] for item in found if item is not None and item[0] == self._generation]

    def _next_bd_seq(self) -> int:
        """One more than at the last CONNECT, 0 after 255, noted before it is used."""
        last = state_file.read(self._state_path).get("bdSeq")
        following = (last + 1) % 256 if isinstance(last, int) and 0 <= last <= 255 else 0
        try:
            state_file.write(self._state_path, {"bdSeq": following})
        except OSError as error:
            raise LinkError(
                "bdSeq cannot be stored",
                which=self._state_path,
                got=error,
                action="check that the folder can be written; hosts match deaths to births by it",
            ) from error
        return following


def _asks_rebirth(event: Inbound) -> bool:
    """Whether an NCMD asks for a birth. Nothing else can be commanded this way: an NCMD is not
    signed. A retained one was for another time."""
    if event.retained:
        log.warning("sparkplug: a retained command is ignored")
        return False
    try:
        metrics = decode(event.body).metrics
    except InputError as error:
        log.warning("sparkplug: a command cannot be read: %s", error)
        return False
    others = sorted({item.name for item in metrics} - {REBIRTH})
    if others:
        log.warning("sparkplug: nothing else can be written: %s", ", ".join(others))
    return any(item.name == REBIRTH and item.value is True for item in metrics)
