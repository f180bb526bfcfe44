"""`forge-station run`: the station on a line, day and night, and `forge-station trigger`.

Opens what the station file names, takes triggers through the gate, inspects, tells whoever asked.
What fails before the first part ends the command with one error; what fails later is an ERROR
verdict, an alarm, or a line that is told to hold its parts. Composes; nothing imports it but `cli`.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import queue
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from forge_station.bundles import deploy
from forge_station.capture.base import Scanner, ScanSource, Trigger
from forge_station.capture.lifecycle import State
from forge_station.capture.supervisor import Change
from forge_station.config import StationConfig
from forge_station.contract.error import ContractError
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.control import Control, deployer_of, served
from forge_station.errors import (
    BundleError,
    ConfigError,
    ModelError,
    OutboxError,
    StationError,
    TriggerError,
)
from forge_station.journal import Journal
from forge_station.line import open_line
from forge_station.mes.alarms import Alarms
from forge_station.mes.health import CAMERA_CODES, CameraFacts
from forge_station.mes.outbox import OutboxFull
from forge_station.mes.stamp import utc_now
from forge_station.monitor import Monitor
from forge_station.notify import Liveness, Watchdog, notify
from forge_station.offline import EXIT_CODES
from forge_station.station import Done, Station, open_station
from forge_station.triggers import local
from forge_station.triggers.gate import Gate, Refusal
from forge_station.triggers.local import SocketTrigger, StdinTrigger
from forge_station.triggers.settings import (
    CameraSource,
    PlcSource,
    SoftwareSource,
    StdinSource,
    TimerSource,
)
from forge_station.triggers.sources import (
    CameraTrigger,
    QueueTrigger,
    Serials,
    Source,
    TimerTrigger,
)

log = logging.getLogger(__name__)

STOPPED, UNAVAILABLE, GAVE_UP, NOT_STORED, REFUSED = 0, 69, 70, 74, 75
IDLE_S = 0.5
HOLD_S = 1.0
DRAIN_S = 2.0

EPILOG = f"""\
exit codes
  {STOPPED}   told to stop (SIGTERM, SIGINT), or the input of the trigger `stdin` has ended
  64  wrong usage, station file or line file
  {UNAVAILABLE}  something cannot be opened: scanner, bundle, outbox, the trigger's port or socket
  {GAVE_UP}  told to stop, and the part in work took longer than runtime.stop_grace_s (or a second
      signal came): it got an ERROR verdict (INTERRUPTED)
  {NOT_STORED}  a result could not be stored, and waiting does not help; the part in work gets
      its ERROR verdict at the next start
A service restarts on all but 0 and 64 (RestartPreventExitStatus=64). deploy/systemd has a unit.
"""


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    """Of `forge-station run`, beside --station."""
    command.description = (
        "Inspect parts as their triggers come, until told to stop. One line a part on stdout:\n"
        "time, serial, product, outcome, reasons, duration. What tells that a part is there is\n"
        "`trigger` in the station file: a PLC, a camera's input line, a local command, MQTT,\n"
        "lines of stdin, or a timer."
    )
    command.epilog = EPILOG


PART_NUMBER_HELP = (
    "product of the line file; needed where that has several and the station file names none "
    "(trigger.part_number)"
)


def add_trigger_arguments(command: argparse.ArgumentParser) -> None:
    """Of `forge-station trigger`, beside --station."""
    command.description = (
        "Tell the station on this machine that a part is there, and print its verdict. The station "
        "file must have `trigger: {source: software}`, the default."
    )
    command.epilog = (
        "exit codes: 0 PASS, 1 FAIL, 2 UNSURE, 3 ERROR; "
        f"{REFUSED} refused (the station is busy or not ready; nothing was inspected); "
        "64 wrong usage, or no station answers"
    )
    command.add_argument("--serial", default="", help="serial number (default: the next number)")
    command.add_argument("--part-number", default="", metavar="P", help=PART_NUMBER_HELP)
    command.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds to wait (default 120)"
    )


def trigger(config: StationConfig, args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Ask the running station. Raises TriggerError when there is none."""
    if not isinstance(config.trigger, SoftwareSource):
        raise ConfigError(
            "the station takes no triggers from this command",
            expected="trigger.source: software",
            got=config.trigger.source,
        )
    answer: Mapping[str, Any] = {}
    for answer in local.ask(_socket(config), args.serial, args.part_number, args.timeout):
        if "refused" in answer:
            print(f"refused: {answer['text']}", file=out)
            return REFUSED
    if "outcome" not in answer:
        raise TriggerError("the station ended before its verdict", which=args.serial or "part")
    reasons = ", ".join(dict.fromkeys(answer["reasons"])) or "-"
    print(f"{answer['serial']}  {answer['outcome']}  {reasons}", file=out)
    for text in dict.fromkeys(answer.get("texts", ())):
        print(f"  {text}", file=out)
    return EXIT_CODES[Outcome(answer["outcome"])]


def run(config: StationConfig, out: TextIO = sys.stdout) -> int:
    """Serve until told to stop; the exit code, see EPILOG. Raises ConfigError."""
    with ExitStack() as stack:
        runner = Runner(config, out)
        try:
            runner.open(stack)
        except ConfigError:
            raise
        except StationError as error:
            print(f"forge-station: {error}", file=sys.stderr)
            return UNAVAILABLE
        try:
            return runner.serve()
        except OutboxError as error:
            print(f"forge-station: {error}", file=sys.stderr)
            return NOT_STORED


class Runner:
    """One run of a station. `open`, then `serve`, then leave the stack that `open` was given."""

    def __init__(self, config: StationConfig, out: TextIO) -> None:
        self.config, self._out = config, out
        self._serials = Serials(config.station)
        self.gate = Gate(config.trigger.queue, self._refused, self._serials.next)
        self.commands = QueueTrigger(self.gate)
        """Where the handler of the command `capture` puts its parts."""
        self._liveness = Liveness(config.runtime.part_limit_s)
        self._journal = Journal(config.outbox.with_name(f"{config.outbox.name}.part.json"))
        self._signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._background = ThreadPoolExecutor(1, "alarms")
        self._refused_lately = self._held = self._unheard = False
        self._advisory = True
        self._station: Station | None = None
        self._alarms: Alarms | None = None
        self._cameras: dict[str, Change] = {}
        self._monitor: Monitor | None = None

    def open(self, stack: ExitStack) -> None:
        """Quick things first, the model last. Raises StationError."""
        stack.enter_context(Watchdog(self._liveness))
        stack.callback(self._background.shutdown, wait=True)
        _require_writable(self.config.evidence.folder)
        line = open_line(self.config, self._camera)
        for product in self.config.line.products:
            stack.enter_context(closing(line.scanner_of(Trigger("", product.part_number))))
        source = self._source(line.camera)
        stack.callback(source.close)
        source.start()
        station = stack.enter_context(self._open_station(line.scanner_of))
        self._station = replace(station, journal=self._journal, hold=self._hold)
        self._serials.start(1 + station.outbox.last_number("verdict"))
        self._alarms = Alarms(station.outbox, station.config.mqtt)
        stack.callback(self._end_alarms)
        for change in list(self._cameras.values()):
            self._alarm_camera(change)
        self._monitor = stack.enter_context(
            Monitor(self._station, alarms=self._alarms, gate=self.gate, camera=self._camera_facts)
        )
        self._advisory = station.inspector.permit.objection is not None
        self._report_left()
        line.warm_up()
        deployer = deployer_of(self._station)
        if deployer is not None:
            self._station.watcher = deployer.part
            stack.enter_context(deployer)
        control = Control(self._station, self._alarms, self.commands.put, self._stopped, deployer)
        stack.enter_context(served(control))
        stack.enter_context(_Signals(self._signals))
        stopper = threading.Thread(target=self._stop_when_told, name="stopper", daemon=True)
        stopper.start()
        stack.callback(stopper.join)
        stack.callback(self._signals.put, None)
        self._print(station.text)
        self._print(station.inspector.permit.text)

    @contextmanager
    def _open_station(
        self, scanner_of: Callable[[Trigger], Scanner | ScanSource]
    ) -> Iterator[Station]:
        """With the active bundle; one on trial that does not open is taken back."""
        place, trust = self.config.bundle, self.config.trust
        done = deploy.before_start(place, trust, self.config.release)
        with ExitStack() as stack:
            try:
                station = stack.enter_context(open_station(self.config, scanner_of))
            except (BundleError, ModelError) as error:
                done = deploy.failed_start(place, trust, error)
                if done is None:
                    raise
                station = stack.enter_context(open_station(self.config, scanner_of))
            if done is not None:
                log.warning("%s", done)
                self._print(done)
            yield station

    def serve(self) -> int:
        """The loop. Raises OutboxError when a result cannot be stored and waiting does not help."""
        assert self._station is not None
        try:
            for done in self._station.run(self._triggers()):
                self.gate.finish(done.verdict)
                self._after(done)
        except OutboxError:
            self.gate.give_up()
            raise
        finally:
            notify("STOPPING=1")
            self.gate.shut("the station stops")
        if self.config.broker != "none":
            self._station.publisher.drain(DRAIN_S)
        return STOPPED

    def _triggers(self) -> Iterator[Trigger]:
        """Parts as they come; begun when the model is warm."""
        self._open_gate()
        notify("READY=1\nSTATUS=waiting for parts")
        self._print(f"ready, trigger: {self.config.trigger.source}")
        while True:
            self._liveness.beat()
            try:
                found = self.gate.take(IDLE_S)
            except EOFError:
                return
            if found is not None:
                yield found

    def _after(self, done: Done) -> None:
        """What follows a part: its line, the alarms that it ends, the state of the station."""
        assert self._station is not None
        self._advisory = self._station.inspector.permit.objection is not None
        self._print(line_of(done.verdict))
        assert self._monitor is not None
        self._monitor.part(done)
        if not self._cameras:  # a camera that is watched tells of itself
            gone = [reason.text for reason in done.verdict.reasons if reason.code in CAMERA_CODES]
            self._alarm(bool(gone), "CAMERA_LOST", "; ".join(gone)[:500])
        if self._held:
            self._held = False
            self._open_gate()
            self._tell(None)
        if not self._refused_lately:
            self._alarm(False, "TRIGGER_REFUSED", "")
        self._refused_lately = False
        self._alarm_drift()

    def _alarm_drift(self) -> None:
        """Level 2 asks for an action this shift, level 3 says that PASS is withheld."""
        assert self._station is not None
        watch = self._station.drift
        if watch is not None:
            text = watch.text[:500]
            for level, key in ((2, "act"), (3, "withheld")):
                self._alarm(watch.level >= level, "DRIFT", text, {"level": level}, key)

    def _open_gate(self) -> None:
        """Take triggers, unless a command has stopped the station."""
        assert self._station is not None
        if self._station.stopped is None:
            self.gate.open()

    def _stopped(self, why: str | None) -> None:
        """A command has stopped the station, or (None) started it again."""
        if why is not None:
            self.gate.shut(f"stopped: {why}")
        elif not self._held and not self._stopping.is_set():
            self.gate.open()

    def _hold(self, error: OutboxError) -> bool:
        """No room for a result: the line holds its parts until there is. False: give up."""
        if not isinstance(error, OutboxFull) or self._stopping.is_set():
            return False
        if not self._held:
            self._held = True
            self.gate.shut("results cannot be stored")
            self.gate.finish(None)
            self._tell(str(error))
            log.error("the line holds: %s", error)
        self._liveness.beat()
        return not self._stopping.wait(HOLD_S)

    def _tell(self, objection: str | None) -> None:
        """The retained state for MES, and systemd's status line."""
        assert self._station is not None
        self._station.tell(objection)
        notify(f"STATUS={objection or 'waiting for parts'}")

    def _refused(self, part: Trigger, refusal: Refusal, text: str) -> None:
        """In the thread of a source: tell, and do not wait for the disk."""
        line = f"{utc_now()}  {_printable(part.serial) or '-'}  REFUSED  {refusal.name}: {text}"
        self._background.submit(self._print, line)
        if not self._refused_lately:
            self._refused_lately = True
            params = {"serial": part.serial[:200], "reason": refusal.name}
            self._alarm(True, "TRIGGER_REFUSED", f"{refusal.name}: {text}", params)

    def _plc_alive(self, alive: bool) -> None:
        self._print(
            f"{utc_now()}  PLC {'is there' if alive else 'is silent: not ready, no result'}"
        )
        self._alarm(not alive, "PLC_LOST", "the PLC's heartbeat stands still")

    def _camera(self, change: Change) -> None:
        """In the thread that watches a camera: it is lost, or there again."""
        if change.state in (State.STALLED, State.STREAMING):
            lost = f"is lost: {change.fault}" if change.lost else "is there"
            self._print(f"{utc_now()}  camera {change.camera} {lost}")
        self._cameras[change.camera] = change
        self._alarm_camera(change)

    def _camera_facts(self) -> CameraFacts | None:
        """All cameras together, for metrics and probes."""
        changes = list(self._cameras.values())
        if not changes:
            return None
        counted = [change.counters for change in changes]
        return CameraFacts(
            up=not any(change.lost for change in changes),
            frames=sum(item.frames for item in counted),
            drops=sum(item.dropped + item.incomplete for item in counted),
        )

    def _alarm_camera(self, change: Change) -> None:
        if change.lost or change.state is State.STREAMING:
            text = str(change.fault or "")[:500]
            self._alarm(change.lost, "CAMERA_LOST", text, key=change.camera)

    def _alarm(
        self,
        active: bool,
        code: str,
        text: str,
        params: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> None:
        """Raise or clear in the background: it takes a disk flush."""
        if self._alarms is not None:
            self._background.submit(self._alarms.set, active, code, text, key=key, params=params)

    def _end_alarms(self) -> None:
        """Tell what is still to be told, before the outbox closes."""
        self._alarms = None
        self._background.submit(lambda: None).result()

    def _report_left(self) -> None:
        """The ERROR verdict of a part that the last run did not finish."""
        assert self._station is not None
        left = self._journal.left()
        if left is None:
            return
        job, number = left
        try:
            verdict = self._station.interrupted(job, number, "the station went down")
        except ContractError as error:  # changed by hand, or written by another release
            log.error("%s names a part that cannot be reported: %s", self._journal.path, error)
        else:
            self._print(line_of(verdict))
        self._journal.end()

    def _stop_when_told(self) -> None:
        """First signal: end after the part in work. Second signal, or grace over: give it up."""
        if self._signals.get() is None:
            return
        notify("STOPPING=1")
        self._stopping.set()
        self.gate.end("the station stops")
        grace_s = self.config.runtime.stop_grace_s
        if self._journal.current is not None:
            self._print(f"stopping, waiting at most {grace_s:g} s for the part in work")
        try:
            if self._signals.get(timeout=grace_s) is None:
                return
        except queue.Empty:
            pass
        self._give_up()

    def _give_up(self) -> None:
        """Write the ERROR verdicts of what was accepted and is not done, and end the process."""
        assert self._station is not None
        current, parts = self._journal.current, self.gate.give_up()
        if not parts:
            return  # nothing is left to wait for: the loop ends by itself
        for number, part in enumerate(parts):
            job = current if number == 0 and current else self._station.job_of(part)
            try:
                why = "told to stop, and it was not done in time"
                self._print(line_of(self._station.interrupted(job, part.part_number, why)))
            except OutboxError as error:
                log.error("part %s: %s", part.serial, error)
                os._exit(GAVE_UP)  # the journal keeps the part in work for the next start
        self._journal.end()
        self._station.outbox.close()
        self._out.flush()
        os._exit(GAVE_UP)

    def _source(self, camera: Any) -> Source:
        settings = self.config.trigger
        number = settings.part_number or self._only_product()
        if isinstance(settings, SoftwareSource):
            return SocketTrigger(self.gate, number, _socket(self.config))
        if isinstance(settings, StdinSource):
            return StdinTrigger(self.gate, number)
        if isinstance(settings, TimerSource):
            return TimerTrigger(self.gate, number, settings.period_s)
        if isinstance(settings, CameraSource):
            if camera is None:
                raise TriggerError(
                    "the scanner has no camera with an input line",
                    which=self.config.scanner.driver,
                    expected="trigger.source other than camera",
                )
            return CameraTrigger(self.gate, number, camera)
        if isinstance(settings, PlcSource):
            from forge_station.triggers.handshake import Facts, Handshake
            from forge_station.triggers.plc import PlcTrigger

            handshake = Handshake(
                self.gate,
                heartbeat_s=settings.heartbeat_s,
                boot=1 + secrets.randbelow(65535),
                part_number=number,
                facts=lambda: Facts(self._liveness.alive, self._advisory),
                on_alive=self._plc_alive,
            )
            return PlcTrigger(settings, handshake)
        return self.commands

    def _only_product(self) -> str:
        """What a trigger without a part number means; empty: nothing, the part is an ERROR."""
        products = self.config.line.products
        return products[0].part_number if len(products) == 1 else ""

    def _print(self, text: str) -> None:
        """A line for people. Its reader may be gone or its disk full: the line goes on."""
        try:
            print(text, file=self._out, flush=True)
        except (OSError, ValueError) as error:
            if not self._unheard:
                log.error("lines for people cannot be written any more: %s", error)
            self._unheard = True


def line_of(verdict: Verdict) -> str:
    """One line: time, serial, product, outcome, reasons, milliseconds."""
    codes = ", ".join(dict.fromkeys(reason.code for reason in verdict.reasons)) or "-"
    spent = verdict.timings_ms.get("total", 0.0)
    return (
        f"{verdict.end_time}  {_printable(verdict.serial)}  {verdict.product}  "
        f"{verdict.outcome.value}  {codes}  {spent:.0f} ms"
    )


def _printable(serial: str) -> str:
    """A serial number with a line break or another control character must not break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in serial)


class _Signals:
    """SIGTERM and SIGINT go into a queue, whose `put` is safe in a handler. A context manager."""

    def __init__(self, told: queue.SimpleQueue[int | None]) -> None:
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._told.put(number)


def _socket(config: StationConfig) -> Path:
    named = config.trigger.socket if isinstance(config.trigger, SoftwareSource) else None
    return named or config.outbox.with_name("trigger.sock")


def _require_writable(folder: Path) -> None:
    """Raises ConfigError for a folder that cannot be made or used. A disk that is full, read-only
    or broken is none of the configuration: the line runs, and the alarm says it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            log.warning("evidence cannot be kept in %s: %s", folder, error.strerror)
            return
        raise ConfigError(
            "the folder for evidence cannot be written",
            which=folder,
            got=error.strerror,
            action="create it for the station's user, or name another one in the station file",
        ) from error
