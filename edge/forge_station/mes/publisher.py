"""Sends the outbox to the broker and keeps the station's retained status there.

It knows the outbox and the link, not paho and not SQLite, nor what a verdict is.

One thread does everything: it connects, keeps at most a window of messages on their way, matches
the broker's answers and tells the outbox. At level 1 a row is delivered on PUBACK with reason 0; at
level 2 (`mqtt.receipts`) on a receipt of the consumer, and nothing is sent while that one is away.
* 0x10, no matching subscribers: nobody got it. It stays; its stream waits, then asks with one row.
* 0x97, quota exceeded: the same.
* any other code from 0x80: to the dead letters, with an alarm.
* the connection ends: what was on its way is sent again, with the same id.
* the broker comes back without its memory: so is what it confirmed in the last seconds, unless a
  consumer that sends receipts was there: it says what it misses.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from forge_station.errors import LinkError, OutboxError
from forge_station.mes import delivery, payloads, publication
from forge_station.mes import link as mqtt_link
from forge_station.mes.backlog import Backlog
from forge_station.mes.delivery import Connect, Connection, Handler, Stats, Timing
from forge_station.mes.link import NO_SUBSCRIBERS, Acknowledged, Down, Event, Inbound, Outgoing
from forge_station.mes.mailbox import Mailbox
from forge_station.mes.outbox import FORMAT_INVALID, Outbox, OutboxFull, Replayed, Row
from forge_station.mes.receipts import BATCH_ROWS, Heard, Receipts
from forge_station.mes.suspicion import Suspicion
from forge_station.mes.takeover import CHECK_S, Takeover
from forge_station.mes.topics import STREAMS, MqttConfig, topic_of

log = logging.getLogger(__name__)

QUOTA_EXCEEDED = 0x97
TOPIC_INVALID = 0x90
PACKET_TOO_LARGE = 0x95
REFUSED_FROM = 0x80

LASTING_S = 5.0
"""A connection that lasted so long was a good one: the next attempt may come soon. Shorter ones
make the waits grow: no storm of two stations with one id, or of a broker in a restart loop."""
REPLIES_WAITING = 100


@dataclass(frozen=True)
class _Sent:
    row: Row | None
    status: str | None
    at: float
    again: bool = False
    """Sent besides the backlog, because a consumer misses it."""


class Publisher:
    """A context manager: `with Publisher(outbox, config):` sends until the block ends.

    It starts without a broker and waits for one. `birth` are further fields of the retained birth
    message (`model`, `capabilities`); ContractError when they break its schema.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: MqttConfig,
        *,
        birth: Mapping[str, Any] | None = None,
        timing: Timing | None = None,
        connect: Connect = mqtt_link.connect,
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._birth: dict[str, Any] = {}
        self._timing = timing or Timing()
        self._stall_s = self._timing.stall_s or delivery.STALL_KEEPALIVES * config.keepalive_s
        self._connect = connect
        self._mailbox = Mailbox()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._statuses: dict[str, Mapping[str, Any]] = {}
        self._unsent: dict[str, None] = {}
        self._generation = 0
        self._backlog = Backlog(self._outbox, STREAMS, self._timing.no_consumer_s)
        self._in_flight: dict[int, _Sent] = {}
        self._window = 0
        self._connected = False
        self._connects = 0
        self._published = self._acked = self._held = self._dead = 0
        self._last_error: str | None = None
        self._progress_at = 0.0
        self._answers = 0
        self._settled_at, self._resent_at = 0.0, -1
        self._suspicion = Suspicion()
        self._alarmed: set[int] = set()
        self._takeover = Takeover(outbox.boot_id)
        self._receipts = Receipts(outbox.epoch, config.receipts)
        self._released: dict[str, int] = {}
        self._again: deque[Row] = deque()
        self._old_before = ""
        self._own: dict[str, Handler] = {
            topic_of(config, "receipt", "+"): self._receipt,
            topic_of(config, "conn"): self._own_conn,
        }
        self._handlers: dict[str, Handler] = {}
        self._asked: deque[str] = deque()
        self._replies: deque[Outgoing] = deque(maxlen=REPLIES_WAITING)
        self._retained: dict[str, bytes] = {}
        self.add_birth(birth or {})

    def __enter__(self) -> Publisher:
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
        """Begin to send. Returns at once, whether or not there is a broker."""
        if self._thread is None:
            self._unsubscribe = self._outbox.on_commit(self._mailbox.wake)
            self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say OFFLINE and end; what is not sent stays in the outbox. May be called twice."""
        if self._thread is not None and not self._stop.is_set():
            self._stop.set()
            self._mailbox.wake()
            self._thread.join()
            self._unsubscribe()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every row is delivered; False when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self._outbox.pending:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def set_status(self, name: str, fields: Mapping[str, Any]) -> None:
        """Publish a retained status (`state`, `last`), now or on the next connect: newest only.

        Raises ContractError when the fields break the schema of that status.
        """
        payloads.status_body(name, self._config.root, fields)
        with self._lock:
            self._statuses[name] = dict(fields)
            self._unsent[name] = None
        self._mailbox.wake()

    def subscribe(self, topic_filter: str, handler: Handler) -> None:
        """Call `handler` with every message of the filter from now on.

        It runs in the publisher's thread: it must only queue, and must not raise.
        """
        self._handlers[topic_filter] = handler
        self._asked.append(topic_filter)
        self._mailbox.wake()

    def send(self, message: Outgoing) -> None:
        """Send a message that may be lost (a reply): once, when there is a connection.

        Waiting ones beyond `REPLIES_WAITING` push out the oldest.
        """
        self._replies.append(message)
        self._mailbox.wake()

    def set_retained(self, topic: str, body: bytes) -> None:
        """Keep the newest `body` at a topic of the site's choice: retained, QoS 0."""
        with self._lock:
            self._retained[topic] = body
            self._unsent[topic] = None
        self._mailbox.wake()

    def add_birth(self, fields: Mapping[str, Any]) -> None:
        """Put further fields into the birth message, now or on the next connect.

        Raises ContractError when they break its schema.
        """
        merged = {**self._birth, **fields}
        every = {**publication.birth_fields(self._outbox), **merged}
        payloads.status_body("birth", self._config.root, every)
        with self._lock:
            self._birth = merged
            self._unsent["birth"] = None
        self._mailbox.wake()

    def rebirth(self) -> None:
        """Publish every retained status anew."""
        with self._lock:
            self._unsent = self._everything()
        self._mailbox.wake()

    def reconnect(self, reason: str) -> None:
        """End the present connection without a word and begin another, e.g. with a renewed
        certificate. What is on its way is sent again."""
        self._mailbox.put(self._generation, Down(None, reason))

    def replay(self, from_seq: int, to_seq: int, epoch: str) -> Replayed:
        """Send the delivered rows of these seqs again, as far as the outbox still holds them.

        Raises OutboxError for numbers that it never gave out under this epoch.
        """
        return self._outbox.replay(from_seq, to_seq, epoch)

    def consumers(self) -> tuple[Heard, ...]:
        """The consumers that send receipts, for the health message."""
        with self._lock:
            return self._receipts.consumers(time.monotonic())

    def stats(self) -> Stats:
        """Counts and state, for the health message and the operator."""
        with self._lock:
            waiting = self._backlog.waiting()
            record = self._receipts.record
            if record and self._connected and not self._receipts.alive(record, time.monotonic()):
                waiting = self._outbox.streams()
            return Stats(
                connected=self._connected,
                published=self._published,
                acked=self._acked,
                held=self._held,
                dead=self._dead,
                in_flight=len(self._in_flight),
                connects=self._connects,
                window=self._window,
                waiting_for_consumer=waiting,
                last_error=self._last_error,
                taken_over=self._takeover.active,
            )

    # The one thread

    def _run(self) -> None:
        try:
            self._connect_again_and_again()
        finally:
            if not self._stop.is_set():
                self._last_error = "the publisher has ended by an error of its own, see the log"
                log.critical("mqtt: %s", self._last_error)

    def _connect_again_and_again(self) -> None:
        first_s, longest_s = self._timing.reconnect_s
        delay_s = first_s
        while not self._stop.is_set():
            self._answers = 0
            began = time.monotonic()
            down = self._connection()
            lasted = down is not None and time.monotonic() - began > LASTING_S
            if lasted:
                delay_s = first_s
            wait_s = delay_s
            taken_over = down is not None and down.reason == mqtt_link.TAKEN_OVER
            self._takeover.ended(taken_over=taken_over, lasted=lasted)
            if taken_over:
                wait_s = self._takeover.wait_s(self._timing.taken_over_s)
                log.error(
                    "mqtt: another client uses the id %s and has taken the connection over:"
                    " two stations must not have the same mqtt.station",
                    self._config.station,
                )
            elif not self._suspicion.active:
                delay_s = min(longest_s, delay_s * 2)
            self._stop.wait(random.uniform(wait_s / 2, wait_s))

    def _connection(self) -> Down | None:
        """Connect and serve until the connection ends. None: it did not come about."""
        self._generation += 1
        generation = self._generation
        try:
            link = self._connect(
                self._config,
                self._conn("CONNECTIONBROKEN"),
                lambda event: self._mailbox.put(generation, event),
            )
        except LinkError as error:
            text = str(error)
            if text != self._last_error:
                log.warning("mqtt: %s", text)
            self._last_error = text
            return None
        log.info("mqtt: connected to %s:%d", self._config.host, self._config.port)
        try:
            self._begin(link)
            down = self._serve(link)
        except (LinkError, OutboxError) as error:
            down = Down(None, str(error))
        except Exception as error:  # a fault of ours must not end the delivery of results for good
            log.exception("mqtt: the publisher has failed and begins a new connection")
            down = Down(None, f"an error of the publisher: {error!r}")
        with self._lock:
            self._connected = False
        if down is None:
            self._say_offline(link)
            link.close()
        else:
            self._last_error = down.text
            log.warning("mqtt: the connection has ended: %s", down.text)
            self._receipts.ended(time.monotonic())
            self._judge_end()
            link.drop()
        with self._lock:
            self._in_flight.clear()
        return down

    def _begin(self, link: Connection) -> None:
        """A new connection: nothing is on its way, every lane starts from its oldest row."""
        now = time.monotonic()
        if self._receipts.record is None:
            self._distrust(link, now)
        with self._lock:
            self._in_flight.clear()
            self._again.clear()
            self._receipts.connected()
            self._backlog = Backlog(self._outbox, STREAMS, self._timing.no_consumer_s)
            self._connected = True
            self._connects += 1
            self._window = link.window
            self._last_error = None
            self._unsent = self._everything()
        self._progress_at = now
        self._takeover.connected(now, again=self._connects > 1)
        link.subscribe(tuple(self._own), as_published=False)  # as told apart by `_own_conn`
        link.subscribe(tuple(self._handlers))

    def _distrust(self, link: Connection, now: float) -> None:
        """A broker without memory: consumers need time to come back as well, and what it confirmed
        last goes out again. A process that begins may have the session of the one before it, which
        may be as new as the broker's memory: it waits, too."""
        first = self._connects == 0
        if self._outbox.previous_shutdown != "first" if first else not link.session_present:
            self._settled_at = now + self._timing.settle_s
        forgot = not link.session_present and self._acked != self._resent_at
        if not forgot or self._receipts.followed or not self._timing.resend_s:
            return
        try:
            again = self._outbox.resend_recent(self._timing.resend_s)
            self._resent_at = self._acked
            log.info("mqtt: the broker has no memory of us: %d rows are sent again", again)
        except OutboxFull as error:
            log.error("mqtt: recent rows cannot be sent again: %s", error)

    def _serve(self, link: Connection) -> Down | None:
        """Send and listen until the connection ends; None when the publisher is to stop."""
        while not self._stop.is_set():
            while self._asked:
                link.subscribe([self._asked.popleft()])
            self._send_statuses(link)
            self._send_replies(link)
            self._send_rows(link)
            for event in self._wait():
                if isinstance(event, Down):
                    return event
                if isinstance(event, Inbound):
                    self._dispatch(event)
                else:
                    self._answered(event)
            now = time.monotonic()
            if not link.alive:
                return Down(None, "the network thread has ended")
            if self._in_flight and now - self._progress_at > self._stall_s:
                return Down(None, f"nothing was confirmed for {self._stall_s:g} s")
        return None

    def _wait(self, longest_s: float = 1.0) -> list[Event]:
        """The events of this connection; waits until something happened or is due."""
        now = time.monotonic()
        due_s = [longest_s, self._backlog.wait_s(now) or longest_s]
        if not self._takeover.may_speak(now):
            due_s.append(CHECK_S)
        if self._in_flight:
            due_s.append(self._progress_at + self._stall_s - now)
        if self._settled_at > now:
            due_s.append(self._settled_at - now)
        return self._mailbox.take(self._generation, min(due_s))

    def _send_statuses(self, link: Connection) -> None:
        if not self._takeover.may_speak(time.monotonic()):
            return
        while self._unsent and len(self._in_flight) < link.window:
            with self._lock:
                name = next(iter(self._unsent))
                del self._unsent[name]
            self._publish(link, self._status(name), _Sent(None, name, time.monotonic()))

    def _send_replies(self, link: Connection) -> None:
        while self._replies and len(self._in_flight) < link.window:
            message = self._replies.popleft()
            try:
                self._publish(link, message, _Sent(None, message.topic, time.monotonic()))
            except ValueError as error:
                log.error("mqtt: a reply cannot be sent: %s: %s", message.topic, error)

    def _dispatch(self, message: Inbound) -> None:
        for topic_filter, handler in (*self._own.items(), *self._handlers.items()):
            if mqtt_link.matches(topic_filter, message.topic):
                try:
                    handler(message)
                except Exception:  # a broken handler must not end the delivery of results
                    log.exception("mqtt: a message to %s could not be taken", message.topic)

    def _own_conn(self, message: Inbound) -> None:
        """The retained word of who was online as this station before this connection."""
        if self._takeover.heard(message.body, retained=message.retained):
            text = "another client with the station's id was online meanwhile"
            self._mailbox.put(self._generation, Down(mqtt_link.TAKEN_OVER, text))

    def _receipt(self, message: Inbound) -> None:
        """Take a consumer's receipt: what it has is delivered, what it misses is sent again."""
        consumer = message.topic.rsplit("/", 1)[-1]
        now = time.monotonic()
        with self._lock:
            positions = self._receipts.heard(
                consumer, message.body, retained=message.retained, now=now
            )
        if positions is None:
            return
        if consumer == self._receipts.record:
            for stream, position in positions.items():
                upto = min(position.upto, self._outbox.last_number(stream))
                if upto > self._released.get(stream, 0):
                    self._released[stream] = upto
                    self._outbox.release(stream, upto)
        if message.retained or self._again:
            return
        for wanted in self._receipts.wanted(
            consumer, self._outbox.streams(), self._outbox.confirmed_upto, now
        ):
            rows, gone = self._outbox.numbered(wanted.stream, wanted.ranges, BATCH_ROWS)
            self._again.extend(rows)
            if gone or wanted.begin is not None:
                self._replies.append(
                    publication.gone_message(
                        self._config, consumer, wanted.stream, self._outbox.epoch,
                        ranges=gone, begin=wanted.begin,
                    )
                )  # fmt: skip

    def _send_rows(self, link: Connection) -> None:
        window = 1 if self._suspicion.active else link.window
        now = time.monotonic()
        if now < self._settled_at:
            return
        self._old_before = publication.old_before()
        while self._again and len(self._in_flight) < window:
            self._send_row(link, self._again.popleft(), again=True)
        while len(self._in_flight) < window and self._receipts.may_send(now):
            row = self._backlog.next(now)
            if row is None:
                return
            self._send_row(link, row)

    def _send_row(self, link: Connection, row: Row, *, again: bool = False) -> None:
        sent = _Sent(row, None, time.monotonic(), again)
        try:
            message = publication.row_message(
                self._config, row, self._outbox.epoch, old_before=self._old_before, again=again
            )
        except ValueError as error:
            self._bury(sent, FORMAT_INVALID, str(error))
            return
        limit = link.maximum_packet_bytes
        if publication.too_large(message, limit):
            self._bury(
                sent, PACKET_TOO_LARGE, f"{len(message.body)} bytes, the broker takes {limit}"
            )
            return
        try:
            self._publish(link, message, sent)
        except ValueError as error:
            self._bury(sent, TOPIC_INVALID, str(error))

    def _publish(self, link: Connection, message: Outgoing, sent: _Sent) -> None:
        packet = link.publish(message)
        with self._lock:
            if not self._in_flight:
                self._progress_at = sent.at
            if message.qos:
                self._in_flight[packet] = sent
            self._published += sent.row is not None

    def _answered(self, answer: Acknowledged) -> None:
        with self._lock:
            sent = self._in_flight.pop(answer.packet, None)
        self._progress_at = time.monotonic()
        if sent is None:
            return
        if sent.row is None:
            if answer.reason >= REFUSED_FROM:
                log.error("mqtt: the broker refuses status %s: %s", sent.status, answer.text)
            return
        row = sent.row
        self._answers += 1
        self._suspicion.confirmed(row.seq)
        if answer.reason >= REFUSED_FROM and answer.reason != QUOTA_EXCEEDED:
            self._bury(sent, answer.reason, answer.text)
        elif sent.again:
            self._acked += 1  # whoever misses it will say so again if it was not for them
        elif answer.reason in (NO_SUBSCRIBERS, QUOTA_EXCEEDED):
            self._outbox.mark(row.seq, "held", answer.reason)
            self._held += 1
            if self._backlog.held(row, time.monotonic()):
                log.warning("mqtt: %s: stream %s waits, its rows are kept", answer.text, row.stream)
        else:
            self._receipts.sent(row.stream, row.stream_seq)
            if self._receipts.record is None:
                self._outbox.mark(row.seq, "acked", answer.reason)
            self._backlog.confirmed(row)
            self._acked += 1
            self._alarmed.clear()

    def _bury(self, sent: _Sent, reason: int, text: str) -> None:
        """To the dead letters; one alarm for each reason until something is confirmed again."""
        row = sent.row
        if row is None:
            return
        if sent.again:
            log.error("mqtt: seq %d cannot be sent again: %s (0x%02x)", row.seq, text, reason)
            return
        self._outbox.mark(row.seq, "dead", reason)
        self._backlog.gone(row)
        self._dead += 1
        log.error(
            "mqtt: seq %d (%s) is refused and moved to the dead letters: %s (0x%02x)",
            row.seq, row.topic, text, reason,
        )  # fmt: skip
        if row.stream == "alarm" or reason in self._alarmed:
            return
        self._alarmed.add(reason)
        alarm = publication.dead_letter_alarm(self._config, row, reason, text)
        try:
            self._outbox.put(alarm.stream, topic_of(self._config, "alarm"), alarm.body, alarm.id)
        except OutboxError as error:
            log.error("mqtt: the alarm could not be stored: %s", error)

    def _judge_end(self) -> None:
        """Bury the row that keeps ending connections, if this end gave it away."""
        rows = {sent.row.seq: sent for sent in self._in_flight.values() if sent.row is not None}
        now = time.monotonic()
        ages_s = {seq: now - sent.at for seq, sent in rows.items()}
        guilty = self._suspicion.ended(ages_s, fruitful=self._answers > 0)
        if guilty is not None:
            text = "the broker ended the connection each time when it alone was on its way"
            self._bury(rows[guilty], PACKET_TOO_LARGE, text)

    # Status

    def _everything(self) -> dict[str, None]:
        """The retained messages of a station that has just come, in this order."""
        return {"birth": None, "conn": None, **dict.fromkeys([*self._statuses, *self._retained])}

    def _status(self, name: str) -> Outgoing:
        if name in self._retained:
            return Outgoing(name, self._retained[name], qos=0, retain=True)
        if name == "conn":
            return self._conn("ONLINE")
        fields = self._statuses.get(name, {})
        if name == "birth":
            fields = {**publication.birth_fields(self._outbox), **self._birth}
        return publication.status_message(self._config, name, fields)

    def _conn(self, state: str) -> Outgoing:
        fields = publication.conn_fields(self._outbox, state)
        return publication.status_message(self._config, "conn", fields)

    def _say_offline(self, link: Connection) -> None:
        """The last word, and the answers to what is still on its way, if they come soon."""
        deadline = time.monotonic() + delivery.GOODBYE_S
        try:
            self._publish(link, self._conn("OFFLINE"), _Sent(None, "conn", time.monotonic()))
        except LinkError as error:
            log.warning("mqtt: OFFLINE could not be said: %s", error)
            return
        while self._in_flight and (left_s := deadline - time.monotonic()) > 0:
            for event in self._wait(left_s):
                if isinstance(event, Down):
                    return
                if isinstance(event, Acknowledged):
                    self._answered(event)


__all__ = ["Connection", "Publisher", "Stats", "Timing"]
