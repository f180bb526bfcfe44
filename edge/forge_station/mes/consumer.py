"""A consumer of record for an MES, in Python: every message once, none missed, across restarts.

    with Consumer(config, "mes", Path("mes.watermark.json")) as consumer:
        for delivery in consumer:
            database.store(delivery.message)        # durable before the loop goes on

Coming back for the next message says that the one before is stored. How far each stream is stored
stands in the watermark file, which is flushed to disk before the station is told (a receipt). The
station sends again what is missing, whatever happened to broker, station or this program meanwhile.

A program that dies after storing a message and before the file was written gets it once more: make
`store` idempotent by `delivery.id`. It knows the interface of the station, nothing of its inside.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from forge_station.contract.error import ContractError
from forge_station.errors import LinkError
from forge_station.mes import payloads, schema, state_file
from forge_station.mes.listen import Listener, Received, ended, line_of
from forge_station.mes.stamp import utc_now
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.mes.watermark import Watermark

log = logging.getLogger(__name__)

BATCH_S = 0.1
"""Messages stored within it share one flush of the watermark file and one receipt."""
TICK_S = 0.02


@dataclass(frozen=True)
class Delivery:
    """One event of the station. `late`: it fills a hole, or was made before others you have."""

    topic: str
    body: bytes
    message: Mapping[str, Any]
    id: str
    stream: str
    epoch: str
    number: int
    """`streamSeq`: 1, 2, 3 in its stream and epoch."""
    late: bool


@dataclass(frozen=True)
class Figures:
    """Since the start: messages given out, repeats dropped, numbers the station has not any more;
    and what is missing now."""

    delivered: int
    repeats: int
    gone: int
    missing: int


class Consumer:
    """Open it as a context manager, then iterate, or call `next`; from one thread.

    `config` names the broker and the station; `name` is this consumer, its MQTT client id and the
    last level of its receipt topic. `heartbeat_s`: a receipt goes out at least so often. Raises
    LinkError when the broker cannot be reached in `timeout_s`, or when another process uses the
    watermark file. It reconnects by itself.
    """

    def __init__(
        self,
        config: MqttConfig,
        name: str,
        watermark: Path,
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._config = config
        self._name = name
        self._path = watermark.absolute()
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._watermark = Watermark()
        self._listener = Listener(
            config, client_id=name, statuses=False, repeats=True, timeout_s=timeout_s
        )
        self._given: Delivery | None = None
        self._stored: list[dict[str, Any]] = []
        self._changed_at: float | None = None
        self._unwritten: str | None = None
        """Why the watermark could not be written last: said once, not with every try."""
        self._delivered = self._repeats = self._gone = 0
        self._ending = threading.Event()
        self._teller: threading.Thread | None = None
        self._lock_fd: int | None = None

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(stored=error is None)

    def __iter__(self) -> Iterator[Delivery]:
        """Deliveries without end."""
        while True:
            delivery = self.next(3600.0)
            if delivery is not None:
                yield delivery

    def start(self) -> None:
        """Read the watermark, subscribe, begin to send receipts."""
        self._lock_fd = self._take_lock()
        try:
            self._load()
            self._listener.start()
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._teller = threading.Thread(target=self._tell_on, name="receipts", daemon=True)
        self._teller.start()

    def close(self, *, stored: bool = True) -> None:
        """Disconnect. `stored`: the last delivery counts as stored."""
        if self._teller is None:
            return
        if stored:
            self._take_given()
        self._ending.set()
        self._teller.join()
        self._teller = None
        if self._save():
            self._tell()
        self._listener.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def next(self, timeout_s: float) -> Delivery | None:
        """The next message that was not delivered yet; None when none came in time.

        The delivery returned before is stored by now, says the call.
        """
        self._take_given()
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            arrived = self._listener.arrived(left_s)
            if arrived is None:
                return None
            self._given = self._read(arrived[0], arrived[1])
            if self._given is not None:
                self._delivered += 1
                return self._given
        return None

    def figures(self) -> Figures:
        """Counts so far."""
        with self._lock:
            missing = sum(
                last - first + 1
                for position in self._watermark.newest().values()
                for first, last in position.missing()
            )
        return Figures(self._delivered, self._repeats, self._gone, missing)

    # Messages

    def _take_given(self) -> None:
        given, self._given = self._given, None
        if given is None:
            return
        with self._lock:
            self._watermark.position(given.stream, given.epoch).take(given.number)
            self._note()

    def _read(self, topic: str, body: bytes) -> Delivery | None:
        """A delivery, if the message is one and is new."""
        try:
            message = json.loads(body)
            if str(message.get("schema")).startswith("gone/"):
                self._take_gone(message)
                return None
            number, epoch = message["streamSeq"], str(message["epoch"])
            stream, row_id = str(message["stream"]), str(message["id"])
            if type(number) is not int or number < 1:
                raise ValueError(f"streamSeq is {number!r:.40}, 1 or more is expected")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s: not a message of this interface: %r", topic, error)
            return None
        with self._lock:
            position = self._watermark.position(stream, epoch)
            if position.has(number):
                self._repeats += 1
                self._note()  # perhaps the last receipt was lost
                return None
            late = number < position.top
        return Delivery(topic, body, message, row_id, stream, epoch, number, late)

    def _take_gone(self, message: Mapping[str, Any]) -> None:
        schema.require(message)
        if message["consumer"] != self._name:
            return
        with self._lock:
            position = self._watermark.position(message["stream"], message["epoch"])
            if "begin" in message:
                position.begin(message["begin"])
            for first, last in message.get("ranges", ()):
                news = position.lacking(first, last)
                self._gone += news
                if news:
                    log.error(
                        "%s %d to %d will not come: refused, given up for room, or too old",
                        message["stream"], first, last,
                    )  # fmt: skip
                    position.take(first, last)
            self._note()

    # Watermark and receipts

    def _note(self) -> None:
        if self._changed_at is None:
            self._changed_at = time.monotonic()

    def _tell_on(self) -> None:
        """The thread: store and tell, in batches and with every heartbeat and new connection."""
        told_at, told_connection = 0.0, 0
        while not self._ending.wait(TICK_S):
            now = time.monotonic()
            changed_at, connection = self._changed_at, self._listener.subscriptions
            due = changed_at is not None and now - changed_at >= BATCH_S
            beat = now - told_at >= self._heartbeat_s or connection != told_connection
            if (due or beat) and self._save() and self._tell():
                told_at, told_connection = now, connection

    def _save(self) -> bool:
        """Flush the watermark to disk if it has changed; False when that failed."""
        with self._lock:
            if self._changed_at is None:
                return True
            facts = {
                "consumer": self._name,
                "source": self._config.root,
                "streams": self._watermark.to_dict(),
            }
            positions = self._watermark.receipt()
            self._changed_at = None
        try:
            state_file.write(self._path, facts)
        except OSError as error:
            if self._unwritten != str(error):
                self._unwritten = str(error)
                log.error("the watermark %s cannot be written: %s", self._path, error)
            with self._lock:
                self._note()
            return False
        self._stored, self._unwritten = positions, None
        return True

    def _tell(self) -> bool:
        body = {
            "schema": "receipt/1.0",
            "consumer": self._name,
            "time": utc_now(),
            "heartbeatS": self._heartbeat_s,
            "positions": self._stored,
        }
        topic = topic_of(self._config, "receipt", self._name)
        return self._listener.publish(topic, payloads.encode(body), retain=True)

    def _load(self) -> None:
        facts = state_file.read(self._path)
        if facts and facts.get("source") != self._config.root:
            raise LinkError(
                "the watermark file belongs to another station",
                which=self._path,
                expected=self._config.root,
                got=facts.get("source"),
                action="give each station its own file",
            )
        try:
            self._watermark = Watermark.of(facts.get("streams", {}))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise LinkError(
                "the watermark file is damaged",
                which=self._path,
                got=repr(error),
                action="remove it: the station then goes on with what it has not delivered yet",
            ) from error
        self._stored = self._watermark.receipt()

    def _take_lock(self) -> int:
        lock = self._path.with_name(self._path.name + ".lock")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise LinkError(
                "the watermark file cannot be written",
                which=self._path,
                got=error.strerror or error,
                action="name one in a folder that this user may write",
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise LinkError(
                "the watermark file is used by another process",
                which=self._path,
                action="stop it, or use another name and file",
            ) from error
        return handle


def run(
    config: MqttConfig,
    name: str,
    watermark: Path,
    out: TextIO,
    *,
    as_json: bool = False,
    count: int | None = None,
    idle_s: float | None = None,
) -> int:
    """`forge-station listen --receipts NAME`: print every event once; exit code as of `listen`.

    Ends after `count` verdicts, or when nothing came for `idle_s`; then says on stderr how it went.
    """
    verdicts = 0
    with Consumer(config, name, watermark) as consumer:
        while count is None or verdicts < count:
            delivery = consumer.next(idle_s if idle_s is not None else 3600.0)
            if delivery is None:
                if idle_s is not None:
                    break
                continue
            text = delivery.body.decode(errors="replace")
            print(text if as_json else _line(delivery), file=out, flush=True)
            verdicts += delivery.stream == "verdict"
        consumer.next(0.01)  # the last one is printed
        figures = consumer.figures()
    print(
        f"{figures.delivered} events, {figures.repeats} repeats dropped, {figures.missing} missing,"
        f" {figures.gone} not held by the station any more; {watermark}",
        file=sys.stderr,
    )
    return ended(verdicts, count)


def _line(delivery: Delivery) -> str:
    late = "late " if delivery.late else ""
    place = f"{late}{delivery.stream} {delivery.number}"
    try:
        schema.require(delivery.message)
    except ContractError as error:
        return f"{place}  breaks its schema: {error}"
    message = delivery.message
    received = Received(delivery.topic, delivery.body, False, message, delivery.stream)
    return f"{place}  {line_of(received)}"


__all__ = ["Consumer", "Delivery", "Figures", "run"]
