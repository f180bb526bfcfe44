"""What watches and mirrors a running station, put together: one object beside the loop.

Health message, alarms and the board (what the operator's page reads) always; metrics and probes,
Sparkplug and OPC UA where the station file has their sections. None of it can stop an inspection or
hold one up: `part` only hands over, and what fails in the background is logged.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forge_station import version
from forge_station.board import Board
from forge_station.capture.base import Trigger
from forge_station.errors import ConfigError, StationError
from forge_station.mes.alarms import Alarms
from forge_station.mes.endpoint import Endpoint, Probes
from forge_station.mes.health import PERIOD_S, CameraFacts, Health, Sources, Vitals, Watch
from forge_station.station import Done, Station
from forge_station.triggers.gate import Gate
from forge_station.vlm import engine

if TYPE_CHECKING:
    from forge_station.mes.metrics import Metrics
    from forge_station.mes.opcua import OpcUaServer
    from forge_station.mes.sparkplug import Mirror

log = logging.getLogger(__name__)

STEP_S = 1.0
"""So soon a change of the machine state reaches the mirrors."""


class Monitor:
    """A context manager: `with Monitor(station) as monitor:`, then `monitor.part(done)` each part.

    `alarms`: of a caller that raises some itself; then CAMERA_LOST is left to it. `gate`: where
    jobs of OPC UA clients are offered. `camera`: how the scanner's cameras are. Raises ConfigError
    when a section of the station file cannot be served.
    """

    def __init__(
        self,
        station: Station,
        *,
        alarms: Alarms | None = None,
        gate: Gate | None = None,
        camera: Callable[[], CameraFacts | None] = lambda: None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._station = station
        self._gate = gate
        self._camera = camera
        self._period_s = period_s
        mqtt = station.config.mqtt
        self.alarms = alarms or Alarms(station.outbox, mqtt)
        self._health = Health(mqtt, self._sources())
        self._watch = Watch(self.alarms, mqtt, cameras=alarms is None)
        self._listeners: list[Callable[[Mapping[str, Any]], None]] = [self._health.note]
        self._board = Board(station.outbox.path, station.outbox.boot_id)
        self._listeners.append(self._board.part)
        self._metrics: Metrics | None = None
        self._mirror: Mirror | None = None
        self._opcua: OpcUaServer | None = None
        self.endpoint: Endpoint | None = None
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._looked_at = time.monotonic()
        self._vitals: Vitals | None = None
        self._told: tuple[str, str | None] | None = None

    def __enter__(self) -> Monitor:
        config, outbox = self._station.config, self._station.outbox
        if outbox.quarantined is not None:
            text = f"the damaged outbox is now {outbox.quarantined}; numbers begin anew"
            self.alarms.event("OUTBOX_RENEWED", text, params={"epoch": outbox.epoch})
        with ExitStack() as stack:
            stack.enter_context(self._board)
            if config.monitor.port is not None:
                self._open_endpoint(stack)
            if config.sparkplug is not None:
                self._open_sparkplug(stack)
            if config.opcua is not None:
                self._open_opcua(stack)
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()

    def part(self, done: Done) -> None:
        """One part went through. Returns at once."""
        verdict = done.verdict.to_dict()
        for listener in self._listeners:
            try:
                listener(verdict)
            except (StationError, KeyError, ValueError, TypeError, RuntimeError):
                log.exception("part %s could not be mirrored", done.verdict.serial)

    def ready(self) -> dict[str, str | None]:
        """What `/readyz` tells: each check with why it fails, None when it holds."""
        state = self._station.state
        vitals = self._vitals
        fault = None
        if vitals is not None and vitals.counts.full:
            fault = "the last result found no room"
        camera = self._camera()
        lost = any(alarm.code == "CAMERA_LOST" for alarm in self.alarms.active())
        inspecting = state["state"] == "OPERATIONAL" and state.get("mode") != "INITIALIZED"
        return {
            "bundle": None,  # a station without a model does not come up
            "scanner": "no camera answers" if lost or (camera and not camera.up) else None,
            "outbox": fault,
            "certificate": self._station.inspector.permit.objection,
            "station": None if inspecting else str(state.get("text") or state["state"]),
        }

    # The one thread

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self._follow_state()
                if time.monotonic() >= due:
                    due = time.monotonic() + self._period_s
                    self._look()
                self._board.status(self._shown())
            except (StationError, OSError, ValueError, KeyError, TypeError, RuntimeError):
                log.exception("the monitor could not look at the station")
            self._stop.wait(min(STEP_S, self._period_s))

    def _look(self) -> None:
        vitals = self._health.look()
        self._watch.judge(vitals)
        active = self.alarms.active()
        codes = [alarm.code for alarm in active]
        self._station.publisher.set_status("health", self._health.fields(vitals, codes))
        if self._metrics is not None:
            self._metrics.look(vitals, active)
            if self._gate is not None:
                counts = self._gate.counts()
                refused = {reason.name: total for reason, total in counts.refused.items()}
                self._metrics.triggers(counts.accepted - counts.answered, refused)
        if self._mirror is not None:
            self._mirror.update(
                {
                    "Model/Certified": self._certified()[0],
                    "Health/Alarms": ",".join(dict.fromkeys(codes)),
                    "Health/Outbox Depth": vitals.counts.pending,
                    "Health/Outbox Fill": float(vitals.counts.fill_pct),
                    "Health/Link": bool(vitals.stats and vitals.stats.connected),
                }
            )
        self._vitals, self._looked_at = vitals, time.monotonic()

    def _shown(self) -> dict[str, Any]:
        """What the operator's page shows of the station itself."""
        station, vitals, camera = self._station, self._vitals, self._camera()
        manifest, permit = station.inspector.model.manifest, station.inspector.permit
        found, watch = permit.certificate, station.drift
        linked = None if station.config.broker == "none" else station.publisher.stats().connected
        held = permit.objection is None and found is not None
        return {
            "state": station.state["state"],
            "mode": station.state.get("mode"),
            "text": str(station.state.get("text") or ""),
            "stopped": station.stopped,
            "product": station.selected,
            "simulated": station.simulated,
            "link": linked,
            "camera": self.ready()["scanner"] is None,
            "frames": None if camera is None else camera.up,
            "outbox": None if vitals is None else vitals.counts.pending,
            "full": vitals is not None and vitals.counts.full,
            "bundle": {
                "name": manifest.name,
                "version": manifest.version,
                "sha256": manifest.sha256,
            },
            "permit": permit.text,
            "certificate": None
            if not held or found is None
            else {
                "escape": found.escape,
                "confidence": found.confidence,
                "expires": found.expires,
                "limit_pass": found.limit_pass,
                "simulated": found.simulated,
            },
            "drift": None if watch is None else {"level": watch.level, "text": watch.text},
        }

    def _follow_state(self) -> None:
        told = self._state()
        if told == self._told:
            return
        self._told = told
        if self._mirror is not None:
            self._mirror.update({"State/Name": told[0], "State/Mode": told[1]})
        if self._opcua is not None:
            self._opcua.state(*told)

    def _state(self) -> tuple[str, str | None]:
        return self._station.state["state"], self._station.state.get("mode")

    def _certified(self) -> tuple[bool, str]:
        permit = self._station.inspector.permit
        return permit.objection is None, permit.text[:1000]

    def _alive(self) -> str | None:
        silent_s = time.monotonic() - self._looked_at
        return f"nothing was looked at for {silent_s:.0f} s" if silent_s > 60 else None

    def _sources(self) -> Sources:
        station = self._station
        manifest = station.inspector.model.manifest
        return Sources(
            outbox=station.outbox,
            stats=station.publisher.stats if station.config.broker != "none" else None,
            camera=lambda: self._camera(),
            consumers=station.publisher.consumers,
            evidence=lambda: None if station.keeper is None else station.keeper.facts(),
            state=self._state,
            certified=self._certified,
            model={"name": manifest.name, "version": manifest.version},
            boot_id=station.outbox.boot_id,
        )

    # The optional parts

    def _open_endpoint(self, stack: ExitStack) -> None:
        metrics = None
        if importlib.util.find_spec("prometheus_client") is not None:
            from forge_station.mes.metrics import CONTENT_TYPE, Metrics

            found = self._metrics = Metrics()
            self._listeners.append(found.note)
            model = self._station.inspector.model
            manifest = model.manifest
            found.describe(
                {"name": manifest.name, "version": manifest.version, "sha256": manifest.sha256,
                 "precision": manifest.precision},
                {"provider": model.provider, "runtime": f"onnxruntime {engine.VERSION}"},
            )  # fmt: skip

            def metrics() -> tuple[bytes, str]:
                return found.text(), CONTENT_TYPE

        probes = Probes(self._alive, self.ready, metrics)
        self.endpoint = stack.enter_context(Endpoint(self._station.config.monitor, probes))
        log.info("monitor on port %d", self.endpoint.port)

    def _open_sparkplug(self, stack: ExitStack) -> None:
        config = self._station.config
        assert config.sparkplug is not None
        _require("google.protobuf", "sparkplug", "sparkplug")
        from forge_station.mes.sparkplug import Mirror

        if config.broker != "external":
            raise ConfigError(
                "the Sparkplug mirror needs a broker that speaks MQTT 3.1.1",
                which="sparkplug",
                expected="broker: external",
                got=f"broker: {config.broker}",
            )
        manifest = self._station.inspector.model.manifest
        values: Mapping[str, Any] = {
            "Properties/Software Version": version(),
            "Properties/Source": config.mqtt.root,
            "Model/Name": manifest.name,
            "Model/Version": manifest.version,
        }
        state = config.outbox.with_name(f"{config.outbox.name}.sparkplug.json")
        self._mirror = stack.enter_context(Mirror(config.mqtt, config.sparkplug, state, values))
        self._listeners.append(self._mirror.verdict)

    def _open_opcua(self, stack: ExitStack) -> None:
        config = self._station.config
        assert config.opcua is not None
        _require("asyncua", "opcua", "opcua")
        from forge_station.mes.opcua import OpcUaServer

        products = [product.part_number for product in config.line.products]
        start = None if self._gate is None else self._offer
        server = OpcUaServer(config.opcua, config.station, products, start)
        self._opcua = stack.enter_context(server)
        self._listeners.append(server.result)

    def _offer(self, part_number: str, serial: str, ended: Callable[[str | None], None]) -> None:
        """A job of an OPC UA client, to the same gate as every other trigger."""
        assert self._gate is not None
        self._gate.offer(
            Trigger(serial, part_number, time.time_ns()),
            lambda verdict: ended(None if verdict is None else verdict.result_id),
        )


def _require(package: str, section: str, extra: str) -> None:
    try:
        missing = importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package that it is part of
        missing = True
    if missing:
        raise ConfigError(
            "a package is missing for a section of the station file",
            which=section,
            expected=package,
            got="not installed",
            action=f"install forge-station[{extra}], or take the section out",
        )
