"""Takes commands from the broker: verifies, remembers, carries out, answers, and writes the audit.

It knows no station: what a command does is a handler given by name. One thread of its own carries
out one command at a time, so that neither the delivery of results nor the inspection waits. What
comes faster than it can be read, or told of, is counted, not answered: a flood fills no outbox.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from forge_station.contract.error import ContractError, StationError
from forge_station.errors import OutboxError
from forge_station.mes import command as commands
from forge_station.mes import payloads
from forge_station.mes.command import Command, CommandConfig, Refused
from forge_station.mes.command_store import Answer, CommandStore
from forge_station.mes.link import Inbound, Outgoing
from forge_station.mes.topics import TOPICS, MqttConfig, topic_of

log = logging.getLogger(__name__)

WAITING = 100
"""Messages that wait to be read; more are dropped and counted."""
TOLD_AT_ONCE = 20
TOLD_PER_S = 1.0
"""Refusals that get an audit message and a reply: a burst, then so many a second."""
FORGED = frozenset({"TOO_LARGE", "RETAINED", "UNKNOWN_KEY", "BAD_SIGNATURE", "REPLAYED"})
"""Refusals that raise the alarm CMD_REFUSED: no honest sender causes them."""

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Carries out a command; gets its arguments, checked against their schema, and returns the result.

`before` and `after` in the result go to the audit. ContractError: the arguments make no sense here.
StationError: it failed, with this code. It must end in seconds.
"""


class Wire(Protocol):
    """What is needed of the publisher."""

    def subscribe(self, topic_filter: str, handler: Callable[[Inbound], None]) -> None: ...
    def send(self, message: Outgoing) -> None: ...


class Events(Protocol):
    """What is needed of the outbox."""

    @property
    def epoch(self) -> str: ...
    def put(self, stream: str, topic: str, body: bytes, id: str | None = None) -> int: ...


Alarm = Callable[[str, str], None]
"""Tells of an event: code and text (`Alarms.event`)."""


@dataclass(frozen=True)
class _Asked:
    """What of a message the answer needs, whether or not it could be read."""

    message: Inbound
    name: str
    command_id: str | None = None
    command: Command | None = None


class CommandServer:
    """A context manager: listens to `in/cmd/+` until the block ends. Without a key it does nothing.

    `handlers`: command -> what it does here; a command without one is refused as NOT_SUPPORTED.
    """

    def __init__(
        self,
        config: MqttConfig,
        settings: CommandConfig,
        handlers: Mapping[str, Handler],
        wire: Wire,
        events: Events,
        store: CommandStore,
        *,
        alarm: Alarm | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        unknown = set(handlers) - set(commands.ROLES)
        if unknown:
            raise ValueError(f"handlers of commands that do not exist: {sorted(unknown)}")
        self._config = config
        self._settings = settings
        self._handlers = dict(handlers)
        self._wire = wire
        self._events = events
        self._store = store
        self._alarm = alarm
        self._clock = clock
        self._waiting: queue.Queue[Inbound | None] = queue.Queue(WAITING)
        self._dropped = 0
        self._suppressed = 0
        self._allowance = float(TOLD_AT_ONCE)
        self._allowed_at = time.monotonic()
        self._thread: threading.Thread | None = None
        if self.enabled:
            commands.canonical({})  # say now that a package is missing
            wire.subscribe(topic_of(config, "command", "+"), self.take)

    @property
    def enabled(self) -> bool:
        """Whether any key is enrolled."""
        return bool(self._settings.keys)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """For the birth message: `command:ping` and so on."""
        return tuple(f"command:{name}" for name in self._handlers) if self.enabled else ()

    def __enter__(self) -> CommandServer:
        if self.enabled and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="commands", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Carry out what was taken, then end. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def take(self, message: Inbound) -> None:
        """Called by the publisher's thread: queue the message, or count it."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            try:
                self._serve(message)
            except OutboxError as error:  # nothing was carried out that is not remembered
                log.error("commands: %s", error)
            except Exception:  # one command must not end the service of all others
                log.exception("commands: a message to %s could not be served", message.topic)

    def _serve(self, message: Inbound) -> None:
        name = message.topic.rsplit("/", 1)[-1]
        asked = _Asked(message, name)
        try:
            if message.retained:
                raise Refused("RETAINED", "commands must not be retained: it would be given again")
            command = commands.read(message.body, self._settings.keys)
            asked = _Asked(message, name, command.id, command)
            known = self._store.answer(command.id)
            if known is not None:
                self._say_again(asked, known)
                return
            self._require_valid(command, name)
        except Refused as refused:
            if asked.command is None:
                asked = _Asked(message, name, commands.told_id(message.body))
            self._refuse(asked, refused)
            return
        self._carry_out(asked, command)

    def _require_valid(self, command: Command, topic_name: str) -> None:
        commands.require_valid(
            command,
            topic_name=topic_name,
            root=self._config.root,
            epoch=self._events.epoch,
            counter=self._store.counter(command.key.key.id),
            now=self._clock(),
        )
        renewed_at = self._store.renewed_at
        if renewed_at is not None and command.issued_at < renewed_at:
            raise Refused("REPLAYED", "issued before this station lost its memory of commands")
        if command.name not in self._handlers:
            raise Refused("NOT_SUPPORTED", f"this station does not take {command.name}")
        commands.require_args(command)

    def _carry_out(self, asked: _Asked, command: Command) -> None:
        """Remember it on disk, do it, remember how it went, tell."""
        self._store.begin(command.id, command.key.key.id, command.counter, command.name)
        try:
            result = self._handlers[command.name](command.args) or {}
            answer = Answer("SUCCEEDED", None, f"{command.name}: done", result)
        except ContractError as error:
            answer = Answer("REJECTED", "BAD_ARGS", _one_line(error), {})
        except StationError as error:
            answer = Answer("FAILED", error.code, _one_line(error), {})
        except Exception as error:  # a fault of the handler is the answer, not the end
            log.exception("commands: %s failed", command.name)
            answer = Answer("FAILED", "STATION_ERROR", _one_line(error), {})
        self._store.finish(command.id, answer)
        log.warning(
            "command %s by %s (key %s): %s %s",
            command.name, command.issuer, command.key.name, answer.status, answer.detail,
        )  # fmt: skip
        self._tell(asked, answer, answer.result)

    def _say_again(self, asked: _Asked, known: Answer) -> None:
        if self._may_tell():
            before = {"status": known.status, "detail": known.detail, "result": known.result}
            if known.code is not None:
                before["code"] = known.code
            text = f"known already, it was {known.status}"
            self._tell(asked, Answer("DUPLICATE", None, text, before), {})

    def _refuse(self, asked: _Asked, refused: Refused) -> None:
        log.warning("a command on %s is refused: %s", asked.message.topic, refused)
        if not self._may_tell():
            return
        status = "EXPIRED" if refused.code == "EXPIRED" else "REJECTED"
        self._tell(asked, Answer(status, refused.code, refused.text, {}), {})
        if self._alarm is not None and refused.code in FORGED:
            self._alarm("CMD_REFUSED", f"a command {asked.name} was refused: {refused}")

    def _may_tell(self) -> bool:
        """Whether one more refusal may be told of; otherwise it is counted."""
        now = time.monotonic()
        gained = (now - self._allowed_at) * TOLD_PER_S
        self._allowance = min(float(TOLD_AT_ONCE), self._allowance + gained)
        self._allowed_at = now
        if self._allowance < 1.0:
            self._suppressed += 1
            return False
        self._allowance -= 1.0
        return True

    def _tell(self, asked: _Asked, answer: Answer, changed: Mapping[str, Any]) -> None:
        """The audit, which must be stored, then the reply, which may be lost."""
        self._audit(asked, answer, changed)
        if asked.command_id is None or not commands.is_name(asked.name):
            return
        fields = {
            "cmdId": asked.command_id,
            "name": asked.name,
            "status": answer.status,
            "code": answer.code,
            "detail": answer.detail[:1000],
            "result": answer.result or None,
        }
        fields = {key: value for key, value in fields.items() if value is not None}
        kind = TOPICS["reply"]
        self._wire.send(
            Outgoing(
                self._reply_topic(asked),
                payloads.status_body("reply", self._config.root, fields),
                kind.qos,
                expiry_s=kind.expiry_s,
                correlation=asked.message.correlation,
            )
        )

    def _reply_topic(self, asked: _Asked) -> str:
        """The sender's choice only among the reply topics: it must not speak through the station.

        And only for a rightly signed command, whose choice it is.
        """
        wished = asked.message.response_topic
        prefix = topic_of(self._config, "reply", "")
        level = wished.removeprefix(prefix) if wished is not None else ""
        if asked.command is not None and wished == f"{prefix}{level}" and commands.is_level(level):
            return wished
        return topic_of(self._config, "reply", asked.command_id)

    def _audit(self, asked: _Asked, answer: Answer, changed: Mapping[str, Any]) -> None:
        command = asked.command
        dropped, self._dropped = self._dropped + self._suppressed, 0
        self._suppressed = 0
        message = payloads.audit_message(
            self._config.root,
            {
                "action": asked.name if commands.is_name(asked.name) else "unknown",
                "outcome": answer.status,
                "code": answer.code,
                "detail": answer.detail[:1000],
                "cmdId": asked.command_id,
                "keyId": command.key.key.id if command else None,
                "keyName": command.key.name if command else None,
                "issuer": command.issuer if command else None,
                "topic": asked.message.topic[:400],
                "args": dict(command.args) if command else None,
                "before": changed.get("before"),
                "after": changed.get("after"),
                "suppressed": dropped or None,
            },
        )
        self._events.put(message.stream, topic_of(self._config, "audit"), message.body, message.id)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
