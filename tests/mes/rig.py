"""What the tests of the MES link share: a verdict, a mosquitto, a broker without a network."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_station.contract.verdict import (
    CheckResult,
    GridReading,
    ModelUsed,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    SurfaceReading,
    Verdict,
    decide,
)
from forge_station.errors import LinkError
from forge_station.mes.link import Acknowledged, Down, Emit, Outgoing
from forge_station.mes.stamp import uuid7
from forge_station.mes.topics import MqttConfig

Cell = tuple[int, int]
MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def verdict(
    front: Sequence[Cell] = (),
    side: Sequence[Cell] = (),
    top: Sequence[Cell] = (),
    result_id: str | None = None,
) -> Verdict:
    """One part with three views: FAIL by a dent when any cell is given, else PASS."""
    views = (("front", front), ("side", side), ("top", top))
    surface = CheckResult("surface", Outcome.PASS, score=9.0, confidence=0.9981, threshold=0.7)
    if front or side or top:
        cells = len(front) + len(side) + len(top)
        reason = Reason("SURFACE_DENT", f"a dent on {cells} cells", "A", 0.9712)
        surface = CheckResult("surface", Outcome.FAIL, (reason,), 3.0, 0.9712, 0.7)
    return decide(
        required=("workpiece", "surface"),
        checks=(
            CheckResult("scan", Outcome.PASS),
            CheckResult("workpiece", Outcome.PASS, confidence=0.9931, threshold=0.8),
            surface,
        ),
        scan=ScanSummary(points=31023, source="sim", calibration="9f8a" * 16),
        result_id=result_id or uuid7(),
        serial="000123",
        product="clamp-bolts",
        parts=(PartReading("A", "hex_bolt", "M8x30", 0.9931, size_mm=(38.12, 13.02, 12.98)),),
        surface=(SurfaceReading("A", "dent" if front or side or top else "normal", 0.9712),),
        grids=tuple(
            GridReading("A", name, _text(cells), tuple(cells), 0.5123, (-12.34, 15.67))  # type: ignore[arg-type]
            for name, cells in views
        ),
        model=ModelUsed("nano-demo", "0.1.0", 3, "ab" * 32, "int8", "CPUExecutionProvider"),
        simulated=True,
        begin_time="2026-11-30T10:38:36.741Z",
        end_time="2026-11-30T10:38:37.741Z",
        timings_ms={"decode": 231.22, "scene": 41.2, "views": 22.0, "model": 380.1, "total": 700.2},
    )


def _text(cells: Sequence[Cell]) -> str:
    rows = sorted({row for row, _ in cells})
    lines = [f"r{row + 1}: {','.join(str(c + 1) for r, c in cells if r == row)}" for row in rows]
    return "\n".join(lines) or "none"


class Mosquitto:
    """A mosquitto of its own on a free port of this machine, with whatever else `config` says."""

    def __init__(self, folder: Path, config: str = "allow_anonymous true") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.host = "127.0.0.1"
        self._file = folder / "mosquitto.conf"
        user = pwd.getpwuid(os.getuid()).pw_name
        self._file.write_text(
            f"listener {self.port} 127.0.0.1\npersistence false\nlog_dest none\nuser {user}\n"
            f"max_queued_messages 0\n{config}\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Mosquitto:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        assert MOSQUITTO
        self.process = subprocess.Popen(
            [MOSQUITTO, "-c", str(self._file)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self.host, self.port), 0.2).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError("mosquitto does not listen")

    def close(self) -> None:
        """kill -9: whatever it holds in memory is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Session:
    """A `Connection` of the publisher to a `ScriptedBroker`."""

    def __init__(self, broker: ScriptedBroker, emit: Emit) -> None:
        self.broker = broker
        self.emit = emit
        self.session_present = broker.session_present
        self.window = broker.window
        self.maximum_packet_bytes = broker.maximum_packet_bytes
        self.alive = True
        self.packet = 0
        self.unanswered = 0

    def publish(self, message: Outgoing) -> int:
        if not self.alive:
            raise LinkError("gone")
        self.packet += 1
        self.broker.got.append(message)
        self.unanswered += bool(message.qos)
        self.broker.most_unanswered = max(self.broker.most_unanswered, self.unanswered)
        reason = self.broker.answer(message) if message.qos else None
        if reason == "drop":
            self.alive = False
            self.emit(Down(None, "the scripted broker closes"))
        elif isinstance(reason, int):
            self.acknowledge(self.packet, reason)
        return self.packet

    def subscribe(self, filters: Sequence[str], *, as_published: bool = True) -> None:
        self.broker.filters.extend(filters)

    def acknowledge(self, packet: int, reason: int) -> None:
        self.unanswered -= 1
        self.emit(Acknowledged(packet, reason, f"reason {reason}"))

    def close(self) -> None:
        self.broker.closed += 1

    def drop(self) -> None:
        self.broker.dropped += 1


class ScriptedBroker:
    """A broker without a network: `answer` gives a PUBACK reason, "drop", or None for silence."""

    def __init__(self, answer: Callable[[Outgoing], int | str | None] = lambda _: 0) -> None:
        self.answer = answer
        self.got: list[Outgoing] = []
        self.wills: list[Outgoing] = []
        self.sessions: list[Session] = []
        self.filters: list[str] = []
        self.refusals = 0
        self.session_present = True
        self.window = 20
        self.maximum_packet_bytes: int | None = None
        self.most_unanswered = 0
        self.closed = 0
        self.dropped = 0

    def connect(self, config: MqttConfig, will: Outgoing, emit: Emit) -> Session:
        if self.refusals:
            self.refusals -= 1
            raise LinkError("no connection to the broker", which=f"{config.host}:{config.port}")
        self.wills.append(will)
        self.sessions.append(Session(self, emit))
        return self.sessions[-1]

    def events(self) -> list[Outgoing]:
        """What was published to evt/."""
        return [item for item in self.got if "/evt/" in item.topic]


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())
