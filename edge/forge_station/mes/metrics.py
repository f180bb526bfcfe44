"""The station's figures for Prometheus, in its text format. Needs the extra `metrics`.

It turns looks (`health.Vitals`) and verdicts into series; `endpoint` serves them. A registry of its
own, so that a program that embeds the station keeps its own figures apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
except ImportError as error:
    raise ImportError("metrics need prometheus_client: install forge-station[metrics]") from error

from forge_station.mes.alarms import CODES, Alarm
from forge_station.mes.health import MODEL_STAGES, Vitals

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
OUTCOMES = ("PASS", "FAIL", "UNSURE", "ERROR")
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All series of one station; any thread may call any method."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"forge_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"forge_{name}", text, labels, registry=registry)

        self._verdicts = counter("verdicts", "Parts by outcome.", ("outcome",))
        for outcome in OUTCOMES:
            self._verdicts.labels(outcome)
        self._reasons = counter(
            "reasons", "Reasons of parts that did not pass.", ("outcome", "code")
        )
        self._skipped = counter("skipped", "Triggers refused, by why.", ("reason",))
        self._refused: dict[str, _FromZero] = {}
        self._inference = Histogram(
            "forge_inference_seconds", "Time in the model for one part.",
            buckets=BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._stages = Histogram(
            "forge_stage_seconds", "Time of one part by stage; total is all of it.", ("stage",),
            buckets=BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._bundle = Info("forge_bundle", "The model bundle.", registry=registry)
        self._provider = Info("forge_provider", "Where the model runs.", registry=registry)
        self._certified = gauge("certified", "1: a part may be called PASS.")
        self._state = gauge("state", "1 for the machine state that holds.", ("state",))
        self._queue = gauge("queue_depth", "Triggers accepted and not yet answered.")
        self._rows = gauge("outbox_rows", "Rows in the outbox.", ("state",))
        self._bytes = gauge("outbox_bytes", "Size of the outbox's file.")
        self._fill = gauge("outbox_fill_ratio", "Share of the quota that is needed, 0 to 1.")
        self._oldest = gauge("outbox_oldest_seconds", "Age of the oldest unconfirmed row.")
        self._eta = gauge("outbox_full_eta_seconds", "Until full at this growth; NaN: never.")
        self._connected = gauge("mqtt_connected", "1: connected to the broker.")
        self._acked = _FromZero(counter("mqtt_acked", "Messages that the broker confirmed."))
        self._sent = _FromZero(counter("mqtt_published", "Messages sent to the broker."))
        self._connects = _FromZero(counter("mqtt_connects", "Connections to the broker."))
        self._in_flight = gauge("mqtt_in_flight", "Messages on their way.")
        self._waiting = gauge("mqtt_streams_waiting", "Streams that nobody takes.")
        self._consumer = gauge("consumer_age_seconds", "Since the last receipt.", ("consumer",))
        self._camera = gauge("camera_up", "1: the camera answers.")
        self._fps = gauge("camera_fps", "Frames a second.")
        self._frames = _FromZero(counter("camera_frames", "Frames captured."))
        self._drops = _FromZero(counter("camera_dropped", "Frames lost or incomplete."))
        self._camera_heat = gauge("camera_temperature_celsius", "Of the camera.")
        self._memory = gauge("process_memory_bytes", "Resident memory of the station.")
        self._cpu = gauge("cpu_ratio", "Share of all cores that is busy, 0 to 1.")
        self._heat = gauge("temperature_celsius", "Of the machine.", ("sensor",))
        self._free = gauge("storage_free_bytes", "Free where the outbox lies.")
        self._total = gauge("storage_total_bytes", "Size of that file system.")
        self._synced = gauge("clock_synced", "1: the clock is synchronised.")
        self._offset = gauge("clock_offset_seconds", "What the kernel believes; + is behind.")
        self._alarms = gauge("alarm_active", "Active alarms by code.", ("code",))
        self._days = gauge("certificate_days_left", "Until the TLS certificate ends.")
        self._uptime = gauge("uptime_seconds", "Since the process began.")
        self._deleted = _FromZero(counter("deletions", "Parts whose evidence was deleted."))
        self._lost = _FromZero(counter("evidence_dropped", "Parts whose evidence was not kept."))
        self._kept = gauge("evidence_bytes", "Evidence that is kept.")
        self._kept_quota = gauge("evidence_quota_bytes", "What evidence may take.")

    def describe(self, bundle: Mapping[str, str], provider: Mapping[str, str]) -> None:
        """What runs, and where."""
        self._bundle.info(dict(bundle))
        self._provider.info(dict(provider))

    def note(self, verdict: Mapping[str, Any]) -> None:
        """Count one part (`Verdict.to_dict()`)."""
        outcome = verdict["outcome"]
        self._verdicts.labels(outcome).inc()
        for code in {reason["code"] for reason in verdict["reasons"]}:
            self._reasons.labels(outcome, code).inc()
        times: Mapping[str, float] = verdict.get("timings_ms", {})
        for stage, spent_ms in times.items():
            self._stages.labels(stage).observe(spent_ms / 1000)
        spent = [times[stage] for stage in MODEL_STAGES if stage in times]
        if spent:
            self._inference.observe(sum(spent) / 1000)

    def triggers(self, waiting: int, refused: Mapping[str, int]) -> None:
        """Parts accepted and not yet answered; triggers not taken, so far, by reason."""
        self._queue.set(waiting)
        for reason, total in refused.items():
            if reason not in self._refused:
                self._refused[reason] = _FromZero(self._skipped.labels(reason))
            self._refused[reason].set(total)

    def look(self, vitals: Vitals, alarms: Iterable[Alarm]) -> None:
        """Take over the facts of one look; what is not known is NaN."""
        counts, stats, camera = vitals.counts, vitals.stats, vitals.camera
        disk, clock = vitals.disk, vitals.clock
        for state, rows in (
            ("pending", counts.pending), ("delivered", counts.acked),
            ("dead", counts.dead), ("dropped", counts.dropped),
        ):  # fmt: skip
            self._rows.labels(state).set(rows)
        self._bytes.set(counts.bytes)
        self._fill.set(counts.fill_pct / 100)
        self._oldest.set(vitals.oldest_age_s or 0.0)
        self._eta.set(_or_nan(vitals.eta_full_s))
        for state in ("PREOPERATIONAL", "OPERATIONAL", "ERROR", "HALTED"):
            self._state.labels(state).set(vitals.state == state)
        self._certified.set(_or_nan(vitals.certified and vitals.certified[0]))
        if stats is not None:
            self._connected.set(stats.connected)
            self._acked.set(stats.acked)
            self._sent.set(stats.published)
            self._connects.set(stats.connects)
            self._in_flight.set(stats.in_flight)
            self._waiting.set(len(stats.waiting_for_consumer))
        for heard in vitals.consumers:
            self._consumer.labels(heard.id).set(_or_nan(heard.age_s))
        if camera is not None:
            self._camera.set(camera.up)
            self._fps.set(_or_nan(vitals.camera_fps))
            self._frames.set(camera.frames or 0)
            self._drops.set(camera.drops or 0)
            self._camera_heat.set(_or_nan(camera.temperature_c))
        self._memory.set(_or_nan(vitals.memory_bytes))
        self._cpu.set(_or_nan(vitals.cpu_percent) / 100)
        for sensor, celsius in vitals.temperatures.items():
            self._heat.labels(sensor).set(celsius)
        self._free.set(_or_nan(disk.free_bytes if disk else None))
        self._total.set(_or_nan(disk.total_bytes if disk else None))
        self._synced.set(_or_nan(clock.synced if clock else None))
        self._offset.set(_or_nan(clock.offset_s if clock else None))
        if vitals.evidence is not None:
            parts = {k: n for k, n in vitals.evidence.deleted.items() if k in OUTCOMES}
            self._deleted.set(sum(parts.values()))
            self._lost.set(vitals.evidence.dropped)
            self._kept.set(vitals.evidence.bytes)
            self._kept_quota.set(vitals.evidence.quota_bytes)
        self._days.set(_or_nan(vitals.certificate_days))
        self._uptime.set(vitals.uptime_s)
        active = [alarm.code for alarm in alarms]
        for code, known in CODES.items():
            if not known.event:
                self._alarms.labels(code).set(active.count(code))

    def text(self) -> bytes:
        """All series in the exposition format, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _FromZero:
    """A counter that follows a total counted elsewhere, which falls only when it begins anew."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0

    def set(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)
