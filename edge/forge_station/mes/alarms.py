"""What is wrong at the station now: raised once, cleared once, remembered over a restart.

A condition (`LINK_DOWN`) is active until it is cleared; an event (`CMD_REFUSED`) is told and over.
Each change is an `alarm` message in the outbox, so that it survives what it reports. It does not
know who finds the conditions (`health`, `commands`, the station), nor how messages travel.

The active set is kept beside the outbox, with how far each alarm has been told. A crash between
file and outbox, or a full outbox, is made good by `flush`: the same message under the same id.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from forge_station.errors import OutboxError
from forge_station.mes import payloads, state_file
from forge_station.mes.stamp import utc_now, uuid7
from forge_station.mes.topics import MqttConfig, topic_of

log = logging.getLogger(__name__)

Told = Literal["raising", "active", "clearing"]


@dataclass(frozen=True)
class Code:
    """One alarm code. Severity 1..1000 as in OPC UA: from 800 on the line is at risk."""

    severity: int
    meaning: str
    event: bool = False
    """Told once; there is nothing to clear."""


CODES: Mapping[str, Code] = {
    "LINK_DOWN": Code(500, "No connection to the broker; results wait in the outbox."),
    "NO_CONSUMER": Code(500, "Nobody subscribes to a stream, or its consumer is silent."),
    "OUTBOX_70": Code(400, "The outbox is 70 % full."),
    "OUTBOX_90": Code(700, "The outbox is 90 % full."),
    "OUTBOX_FULL": Code(1000, "The outbox takes no more results: the line must stop."),
    "OUTBOX_RENEWED": Code(900, "A damaged outbox was moved aside; a new epoch began.", event=True),
    "DEAD_LETTER": Code(800, "A message was refused for good and is kept.", event=True),
    "DISK_LOW": Code(800, "Little free space on the outbox's disk."),
    "CLOCK_UNSYNCED": Code(300, "The clock is not synchronised: order by seq, not by time."),
    "CERT_EXPIRING": Code(500, "The station's TLS certificate ends in 30 days or less."),
    "CERT_EXPIRED": Code(900, "The station's TLS certificate has ended."),
    "DUPLICATE_ID": Code(900, "Another client uses the station's id at the broker."),
    "INSECURE_LINK": Code(300, "Messages to another machine are not encrypted (mqtt.insecure)."),
    "CAMERA_LOST": Code(900, "The camera is gone; parts are ERROR until it is back."),
    "PLC_LOST": Code(800, "The PLC's heartbeat has stopped: not ready, no result is shown."),
    "TRIGGER_REFUSED": Code(600, "Triggers came that the station could not take."),
    "EVIDENCE_NOT_STORED": Code(500, "The evidence of a part could not be kept."),
    "EVIDENCE_THINNED": Code(400, "Evidence of parts that did not pass is deleted for room."),
    "NOT_CERTIFIED": Code(600, "The model's certificate does not hold: no part is called PASS."),
    "DRIFT": Code(600, "Scores or images drift from those at release."),
    "MODEL_REJECTED": Code(700, "A model bundle was refused.", event=True),
    "ROLLED_BACK": Code(800, "The station went back to the model before.", event=True),
    "CMD_REFUSED": Code(500, "A command was refused.", event=True),
}
"""The published codes. Codes may be added in a minor version, never renamed."""


class Events(Protocol):
    """What is needed of the outbox."""

    @property
    def path(self) -> Path: ...
    def put(self, stream: str, topic: str, body: bytes, id: str | None = None) -> int: ...


@dataclass(frozen=True)
class Alarm:
    """One active alarm. `key` tells several of one code apart, e.g. the stream or the camera."""

    code: str
    key: str
    text: str
    severity: int
    since: str
    instance_id: str
    params: Mapping[str, Any]
    acked: bool = False


@dataclass
class _Entry:
    alarm: Alarm
    told: Told


class Alarms:
    """The active set of one station; any thread may call any method.

    No method raises for a full outbox or disk: what could not be told is told by a later `flush`.
    """

    def __init__(self, outbox: Events, config: MqttConfig, path: Path | None = None) -> None:
        self.path = path or outbox.path.with_name(f"{outbox.path.name}.alarms.json")
        self._outbox = outbox
        self._config = config
        self._lock = threading.RLock()
        self._entries = {
            (entry.alarm.code, entry.alarm.key): entry
            for entry in _entries(state_file.read(self.path).get("alarms", []), config.root)
        }
        self.flush()

    def active(self) -> tuple[Alarm, ...]:
        """What is wrong now, the most severe first."""
        with self._lock:
            found = [item.alarm for item in self._entries.values() if item.told != "clearing"]
        return tuple(sorted(found, key=lambda item: (-item.severity, item.since)))

    def set(
        self,
        active: bool,
        code: str,
        text: str,
        *,
        key: str = "",
        severity: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> bool:
        """Raise or clear by a condition's present value; True when that is a change."""
        if active:
            return self.raise_(code, text, key=key, severity=severity, params=params)
        return self.clear(code, text, key=key)

    def raise_(
        self,
        code: str,
        text: str,
        *,
        key: str = "",
        severity: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> bool:
        """Raise a condition. False when it is active already: nothing is told again."""
        known = _code(code, event=False)
        with self._lock:
            entry = self._entries.get((code, key))
            if entry is not None and entry.told != "clearing":
                return False
            if entry is not None and not self._tell(entry):
                return False  # its end could not be told yet: the next call tries again
            alarm = Alarm(
                code, key, text, severity or known.severity, utc_now(), uuid7(), dict(params or {})
            )
            self._entries[code, key] = _Entry(alarm, "raising")
            log.warning("alarm %s %s: %s", code, key, text)
            self._save()
            self._tell(self._entries[code, key])
            return True

    def clear(self, code: str, text: str = "", *, key: str = "") -> bool:
        """End a condition. False when it was not active."""
        _code(code, event=False)
        with self._lock:
            entry = self._entries.get((code, key))
            if entry is None or entry.told == "clearing":
                return False
            if entry.told == "raising" and not self._tell(entry):
                return False
            entry.told = "clearing"
            if text:
                entry.alarm = replace(entry.alarm, text=text)
            log.info("alarm %s %s is over: %s", code, key, entry.alarm.text)
            self._save()
            self._tell(entry)
            return True

    def event(
        self,
        code: str,
        text: str,
        *,
        severity: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell of something that is over already: one message, `active` false."""
        known = _code(code, event=True)
        alarm = Alarm(
            code, "", text, severity or known.severity, utc_now(), uuid7(), dict(params or {})
        )
        log.warning("alarm %s: %s", code, text)
        self._put(alarm, active=False, suffix="event")

    def acknowledge(self, instance_id: str) -> bool:
        """A person has seen it. False when no such alarm is active, or it was acknowledged."""
        with self._lock:
            for entry in self._entries.values():
                alarm = entry.alarm
                if alarm.instance_id == instance_id and entry.told == "active" and not alarm.acked:
                    entry.alarm = replace(alarm, acked=True)
                    self._save()
                    self._put(entry.alarm, active=True, suffix="acked")
                    return True
        return False

    def flush(self) -> bool:
        """Tell what could not be told before; True when nothing is left."""
        with self._lock:
            waiting = [item for item in self._entries.values() if item.told != "active"]
            return all(self._tell(item) for item in waiting)

    def _tell(self, entry: _Entry) -> bool:
        """Put what is to be told of an entry into the outbox; True when it is there."""
        raised = entry.told == "raising"
        if entry.told == "active":
            return True
        if not self._put(entry.alarm, active=raised, suffix="raised" if raised else "cleared"):
            return False
        if raised:
            entry.told = "active"
        else:
            del self._entries[entry.alarm.code, entry.alarm.key]
        self._save()
        return True

    def _put(self, alarm: Alarm, *, active: bool, suffix: str) -> bool:
        message = _message(alarm, self._config.root, active=active)
        topic = topic_of(self._config, "alarm")
        try:
            self._outbox.put(message.stream, topic, message.body, f"{alarm.instance_id}.{suffix}")
        except OutboxError as error:
            log.error("alarm %s could not be stored: %s", alarm.code, error)
            return False
        return True

    def _save(self) -> None:
        facts = [
            {
                "code": entry.alarm.code,
                "key": entry.alarm.key,
                "text": entry.alarm.text,
                "severity": entry.alarm.severity,
                "since": entry.alarm.since,
                "instance_id": entry.alarm.instance_id,
                "params": dict(entry.alarm.params),
                "acked": entry.alarm.acked,
                "told": entry.told,
            }
            for entry in self._entries.values()
        ]
        try:
            state_file.write(self.path, {"alarms": facts})
        except OSError as error:
            log.error("the active alarms cannot be stored in %s: %s", self.path, error)


def _code(code: str, *, event: bool) -> Code:
    known = CODES.get(code)
    if known is None or known.event is not event:
        kind = "an event" if event else "a condition"
        raise ValueError(f"{code} is no code of {kind} in alarms.CODES")
    return known


def _message(alarm: Alarm, source: str, *, active: bool) -> payloads.Message:
    """Raises ContractError for an alarm that breaks the schema."""
    return payloads.alarm_message(
        alarm.code,
        alarm.text,
        source,
        severity=alarm.severity,
        active=active,
        params=alarm.params,
        instance_id=alarm.instance_id,
        since=alarm.since,
        acked=alarm.acked,
    )


def _entries(facts: object, source: str) -> list[_Entry]:
    """The entries of the file, without those (with a word in the log) that are none."""
    if not isinstance(facts, list):
        log.error("the alarms of the last run cannot be read: they are no list")
        return []
    entries = (_entry(item, source) for item in facts)
    return [entry for entry in entries if entry is not None]


def _entry(facts: object, source: str) -> _Entry | None:
    """An entry of the file; None when it is not one, or could not be told of."""
    try:
        fields = dict(facts)  # type: ignore[call-overload]
        told = fields.pop("told")
        if told not in get_args(Told):
            raise ValueError(f"told is {told!r}")
        entry = _Entry(Alarm(**fields), told)
        if not isinstance(entry.alarm.key, str):
            raise ValueError(f"key is {entry.alarm.key!r}")
        _message(entry.alarm, source, active=True)
        return entry
    except (TypeError, ValueError, KeyError) as error:
        log.error("an alarm of the last run cannot be read: %s", error)
        return None


__all__ = ["CODES", "Alarm", "Alarms", "Code"]
