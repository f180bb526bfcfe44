"""How the station is: one look every ten seconds, for the health message, metrics and alarms.

It collects and judges; it does not send (`publisher`) or remember (`alarms`). What it looks at is
given to it: outbox, publisher, camera. A fact that cannot be had is left out, never guessed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509

from forge_station.mes import machine
from forge_station.mes.alarms import Alarms
from forge_station.mes.delivery import Stats
from forge_station.mes.outbox import Counts
from forge_station.mes.outbox_figures import Growth
from forge_station.mes.receipts import Heard
from forge_station.mes.stamp import utc_now
from forge_station.mes.topics import MqttConfig
from forge_station.timing import latency

log = logging.getLogger(__name__)

PERIOD_S = 10.0
RECENT_PARTS = 200
"""Of so many parts the times in the model are kept."""
MODEL_STAGES = ("read", "judge", "surface")
"""Stages of a verdict's `timings_ms` that are the model's."""
THINNED_S = 3600.0
"""EVIDENCE_THINNED ends when for so long nothing but PASS had to go."""
CAMERA_CODES = frozenset({"CAMERA_LOST", "CAMERA_NOT_FOUND", "CAMERA_BUSY"})
"""Reason codes of a part that say that there is no camera."""


@dataclass(frozen=True)
class CameraFacts:
    """What a scanner's supervisor knows; counts are since it was opened."""

    up: bool
    frames: int | None = None
    drops: int | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class EvidenceFacts:
    """What is kept of parts. `deleted` by outcome, since the index was begun; `dropped` never came
    to the disk, since the process began; `fault`: why the last one did not."""

    parts: int
    bytes: int
    quota_bytes: int
    deleted: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    waiting: int = 0
    fault: str | None = None

    @property
    def missed(self) -> int:
        """Parts that did not pass and whose evidence was deleted for room."""
        return sum(self.deleted.get(name, 0) for name in ("FAIL", "UNSURE"))


class Backlog(Protocol):
    """What is needed of the outbox."""

    @property
    def path(self) -> Path: ...
    def counts(self) -> Counts: ...


@dataclass(frozen=True)
class Sources:
    """Where the facts come from. The station gives what it has; None: not known."""

    outbox: Backlog
    stats: Callable[[], Stats] | None = None
    """None: the station has no broker, and nobody misses one."""
    camera: Callable[[], CameraFacts | None] = lambda: None
    evidence: Callable[[], EvidenceFacts | None] = lambda: None
    consumers: Callable[[], Sequence[Heard]] = tuple
    state: Callable[[], tuple[str, str | None]] = lambda: ("OPERATIONAL", None)
    """Machine state and mode, as the retained `state` message has them."""
    certified: Callable[[], tuple[bool, str]] | None = None
    """Whether a part may be called PASS, and the reason in words."""
    model: Mapping[str, str] = field(default_factory=dict)
    """`name` and `version`."""
    boot_id: str = "00000000"


@dataclass(frozen=True)
class Vitals:
    """One look."""

    uptime_s: float
    state: str
    mode: str | None
    counts: Counts
    oldest_age_s: float | None
    eta_full_s: float | None
    stats: Stats | None
    link_since: str
    camera: CameraFacts | None
    camera_fps: float | None
    model_ms: tuple[float, ...]
    outcomes: Mapping[str, int]
    cpu_percent: float | None
    memory_bytes: int | None
    temperatures: Mapping[str, float]
    disk: machine.Disk | None
    clock: machine.Clock | None
    certified: tuple[bool, str] | None
    certificate_days: float | None
    consumers: tuple[Heard, ...]
    insecure: bool
    evidence: EvidenceFacts | None = None


class Health:
    """Looks when told to. `note` may come from another thread than `look`."""

    def __init__(
        self,
        config: MqttConfig,
        sources: Sources,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._sources = sources
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._model_ms: deque[float] = deque(maxlen=RECENT_PARTS)
        self._camera_gone = False
        self._cpu = machine.CpuLoad()
        self._link: tuple[bool | None, str] = (None, utc_now())
        self._growth = Growth(monotonic)
        self._frames: tuple[float, int] | None = None

    def note(self, verdict: Mapping[str, Any]) -> None:
        """Count one part. `verdict` is `Verdict.to_dict()`, its timings those of the whole part."""
        times: Mapping[str, float] = verdict.get("timings_ms", {})
        spent = [times[stage] for stage in MODEL_STAGES if stage in times]
        codes = {reason["code"] for reason in verdict["reasons"]}
        with self._lock:
            self._outcomes[verdict["outcome"]] += 1
            self._camera_gone = bool(codes & CAMERA_CODES)
            if spent:
                self._model_ms.append(sum(spent))

    def look(self) -> Vitals:
        """Collect everything now. Takes a read of the outbox and of a few small files."""
        sources = self._sources
        counts = sources.outbox.counts()
        stats = sources.stats() if sources.stats else None
        connected = stats.connected if stats else None
        if connected != self._link[0]:
            self._link = (connected, utc_now())
        camera = sources.camera()
        with self._lock:
            model_ms = tuple(self._model_ms)
            outcomes = dict(self._outcomes)
            gone = self._camera_gone
        if camera is None and gone:
            camera = CameraFacts(up=False)
        state, mode = sources.state()
        return Vitals(
            uptime_s=machine.process_seconds(),
            state=state,
            mode=mode,
            counts=counts,
            oldest_age_s=_age_s(counts.oldest_pending_utc),
            eta_full_s=self._growth.eta_full_s(counts.fill_pct),
            stats=stats,
            link_since=self._link[1],
            camera=camera,
            camera_fps=self._fps(camera),
            model_ms=model_ms,
            outcomes=outcomes,
            cpu_percent=self._cpu.percent(),
            memory_bytes=machine.memory_bytes(),
            temperatures=machine.temperatures(),
            disk=machine.disk(sources.outbox.path.parent),
            clock=machine.clock(),
            certified=sources.certified() if sources.certified else None,
            certificate_days=days_left(self._config.tls_cert),
            consumers=tuple(sources.consumers()),
            insecure=self._config.security == "insecure",
            evidence=sources.evidence(),
        )

    def fields(self, vitals: Vitals, alarms: Sequence[str]) -> dict[str, Any]:
        """The fields of the `health` status. `alarms` are the codes of what is active."""
        counts, stats, camera = vitals.counts, vitals.stats, vitals.camera
        link: dict[str, Any] = {"connected": False, "reconnects": 0, "since": vitals.link_since}
        if stats is not None:
            link |= {
                "connected": stats.connected,
                "reconnects": max(0, stats.connects - 1),
                "lastReason": stats.last_error,
                "window": stats.window,
                "waitingForConsumer": list(stats.waiting_for_consumer) or None,
            }
        spent = latency(vitals.model_ms)
        return _without_none(
            {
                "bootId": self._sources.boot_id,
                "uptimeS": round(vitals.uptime_s, 1),
                "state": vitals.state,
                "mode": vitals.mode,
                "alarms": list(dict.fromkeys(alarms)),
                "insecure": vitals.insecure or None,
                "timeQuality": vitals.clock and ("synced" if vitals.clock.synced else "unsynced"),
                "outbox": {
                    "depth": counts.pending,
                    "bytes": counts.bytes,
                    "fillPct": min(100.0, counts.fill_pct),
                    "oldestAgeS": vitals.oldest_age_s,
                    "dead": counts.dead,
                    "etaFullS": None if vitals.eta_full_s is None else round(vitals.eta_full_s),
                },
                "link": link,
                "camera": camera
                and {
                    "up": camera.up,
                    "fps": vitals.camera_fps,
                    "frames": camera.frames,
                    "drops": camera.drops,
                    "tempC": camera.temperature_c,
                },
                "infer": spent and {"p50Ms": spent.p50, "p99Ms": spent.p99, "parts": spent.count},
                "parts": {"total": sum(vitals.outcomes.values()), **vitals.outcomes},
                "cpuPct": vitals.cpu_percent,
                "memBytes": vitals.memory_bytes,
                "tempC": max(vitals.temperatures.values(), default=None),
                "disk": vitals.disk
                and {"freeBytes": vitals.disk.free_bytes, "totalBytes": vitals.disk.total_bytes},
                "clock": vitals.clock
                and {
                    "synced": vitals.clock.synced,
                    "offsetMs": round(1000 * vitals.clock.offset_s, 3),
                },
                "model": self._model(vitals),
                "certDaysLeft": vitals.certificate_days,
                "consumers": [_consumer(item) for item in vitals.consumers] or None,
                "evidence": vitals.evidence and _evidence(vitals.evidence),
            }
        )

    def _model(self, vitals: Vitals) -> dict[str, Any] | None:
        if not self._sources.model:
            return None
        certified = vitals.certified[0] if vitals.certified else None
        return {**self._sources.model, "certified": certified}

    def _fps(self, camera: CameraFacts | None) -> float | None:
        if camera is None or camera.frames is None:
            return None
        now, last = self._monotonic(), self._frames
        self._frames = (now, camera.frames)
        if last is None or now <= last[0] or camera.frames < last[1]:
            return None
        return round((camera.frames - last[1]) / (now - last[0]), 2)


class Watch:
    """Raises and clears alarms by what a look shows, with patience: nothing flaps.

    `cameras` False: somebody who knows more of them raises CAMERA_LOST.
    """

    def __init__(
        self,
        alarms: Alarms,
        config: MqttConfig,
        *,
        cameras: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alarms = alarms
        self._config = config
        self._cameras = cameras
        self._monotonic = monotonic
        self._since: dict[tuple[str, str], tuple[bool, float]] = {}
        self._missed: int | None = None

    def judge(self, vitals: Vitals) -> None:
        """Set every alarm that the facts decide, and tell what could not be told before."""
        self._alarms.flush()
        self._judge_link(vitals)
        counts = vitals.counts
        for percent in (70, 90):
            self._level(f"OUTBOX_{percent}", counts.fill_pct, percent)
        self._set(counts.full, "OUTBOX_FULL", f"no room; {counts.pending} messages wait")
        free = f"{vitals.disk.free_bytes >> 20} MB free" if vitals.disk else "little free space"
        self._set(counts.disk_low, "DISK_LOW", free, relief_s=30)
        if vitals.clock is not None:
            self._set(not vitals.clock.synced, "CLOCK_UNSYNCED", "no time source", patience_s=60)
        if self._cameras:
            gone = vitals.camera is not None and not vitals.camera.up
            self._set(gone, "CAMERA_LOST", "no camera answers")
        if vitals.certified is not None:
            self._set(not vitals.certified[0], "NOT_CERTIFIED", vitals.certified[1])
        self._judge_certificate(vitals.certificate_days)
        if vitals.evidence is not None:
            self._judge_evidence(vitals.evidence)

    def _judge_evidence(self, facts: EvidenceFacts) -> None:
        fault = facts.fault
        text = f"{fault}; {facts.dropped} parts so far"[:500]
        self._set(fault is not None, "EVIDENCE_NOT_STORED", text)
        before, self._missed = self._missed, facts.missed
        text = f"evidence of {facts.missed} parts that did not pass was deleted for room"
        gone = before is not None and facts.missed > before
        self._set(gone, "EVIDENCE_THINNED", text, relief_s=THINNED_S)

    def _judge_link(self, vitals: Vitals) -> None:
        stats = vitals.stats
        where = f"{self._config.host}:{self._config.port}"
        if stats is None:
            return
        text = f"{where}: {stats.last_error or 'not connected'}"
        patience_s = 2.0 * self._config.keepalive_s
        self._set(not stats.connected, "LINK_DOWN", text, patience_s=patience_s)
        text = f"another client is connected to {where} as {self._config.station}"
        self._set(stats.taken_over, "DUPLICATE_ID", text)
        self._set(vitals.insecure, "INSECURE_LINK", f"{where} without TLS")
        known = {alarm.key for alarm in self._alarms.active() if alarm.code == "NO_CONSUMER"}
        for stream in sorted(known | set(stats.waiting_for_consumer)):
            waits = stream in stats.waiting_for_consumer
            if waits or stats.connected:
                text = f"nobody takes the stream {stream}; its messages are kept"
                self._set(waits, "NO_CONSUMER", text, key=stream, relief_s=30)

    def _judge_certificate(self, days: float | None) -> None:
        if days is None:
            return
        text = f"{self._config.tls_cert} ends in {days:.1f} days"
        self._set(0 < days <= 30, "CERT_EXPIRING", text)
        self._set(0 < days <= 7, "CERT_EXPIRING", text, key="7 days", severity=800)
        self._set(days <= 0, "CERT_EXPIRED", f"{self._config.tls_cert} ended {-days:.1f} days ago")

    def _level(self, code: str, percent: float, limit: float) -> None:
        """Active from `limit` on, over below 5 % less; between them as it was."""
        text = f"the outbox is {percent:.0f} % full"
        if percent >= limit:
            self._alarms.raise_(code, text)
        elif percent < limit - 5:
            self._alarms.clear(code)

    def _set(
        self,
        wrong: bool,
        code: str,
        text: str,
        *,
        key: str = "",
        severity: int | None = None,
        patience_s: float = 0.0,
        relief_s: float = 0.0,
    ) -> None:
        """Raise what is wrong for `patience_s`, clear what is right for `relief_s`."""
        now = self._monotonic()
        was, since = self._since.get((code, key), (not wrong, now))
        if was is not wrong:
            since = now
        self._since[code, key] = (wrong, since)
        if wrong and now - since >= patience_s:
            self._alarms.raise_(code, text, key=key, severity=severity)
        elif not wrong and now - since >= relief_s:
            self._alarms.clear(code, key=key)


def _evidence(facts: EvidenceFacts) -> dict[str, Any]:
    return {
        "parts": facts.parts,
        "bytes": facts.bytes,
        "quotaBytes": facts.quota_bytes,
        "deleted": dict(facts.deleted),
        "dropped": facts.dropped,
        "waiting": facts.waiting,
    }


def _consumer(heard: Heard) -> dict[str, Any]:
    results = heard.positions.get("verdict")
    facts = {"id": heard.id, "alive": heard.alive, "ageS": heard.age_s}
    return _without_none({**facts, "upto": results and results.upto})


def days_left(certificate: Path | None) -> float | None:
    """Days until a PEM certificate ends, negative after it; None without one, or when unreadable
    (connecting then fails with its own error)."""
    if certificate is None:
        return None
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return None
    left = found.not_valid_after_utc - datetime.now(timezone.utc)
    return round(left.total_seconds() / 86400.0, 2)


def _age_s(utc: str | None) -> float | None:
    if utc is None:
        return None
    then = datetime.fromisoformat(utc.replace("Z", "+00:00"))
    return round(max(0.0, (datetime.now(timezone.utc) - then).total_seconds()), 1)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if value is not None
    }


__all__ = [
    "CameraFacts",
    "EvidenceFacts",
    "Health",
    "Sources",
    "Vitals",
    "Watch",
    "days_left",
]
