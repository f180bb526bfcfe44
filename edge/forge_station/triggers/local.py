"""Triggers from this machine: a Unix socket for `forge-station trigger`, and lines of stdin.

One line of JSON in, `{"serial": "...", "part_number": "..."}`; out comes one line that it was
accepted or refused, and one with the verdict. Who may open the socket (mode 0600: this user and
root) may trigger. A refused trigger is told why, and never kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from forge_station.capture.base import Trigger
from forge_station.contract.verdict import REASONS, Verdict
from forge_station.errors import TriggerError
from forge_station.triggers.gate import Gate, TriggerRefusedError
from forge_station.triggers.sources import Thread

log = logging.getLogger(__name__)

MOST_BYTES = 4096
MOST_CLIENTS = 16
PATIENCE_S = 5.0
"""For a client to say its line."""


class SocketTrigger(Thread):
    """Listens on a Unix socket. `part_number` is for triggers that name none."""

    name = "trigger socket"

    def __init__(self, gate: Gate, part_number: str, path: Path) -> None:
        super().__init__(gate)
        self._part_number, self._path = part_number, path
        self._listener: socket.socket | None = None
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)

    def start(self) -> None:
        """Listen. Raises TriggerError when another process does, or the path cannot be used."""
        self._listener = _listen(self._path)
        super().start()

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def step(self) -> None:
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except TimeoutError:
            return
        except OSError as error:  # too many open files: the next one may come through
            log.warning("trigger socket: %s", error)
            self._stop.wait(1.0)
            return
        if not self._clients.acquire(blocking=False):
            client.close()
            return
        threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        answered = threading.Event()
        found: list[Verdict | None] = []

        def answer(verdict: Verdict | None) -> None:
            found.append(verdict)
            answered.set()

        try:
            with client, contextlib.suppress(OSError):  # a client that went away: nobody waits
                client.settimeout(PATIENCE_S)
                try:
                    trigger = self._gate.offer(self._read(client), answer)
                except TriggerRefusedError as error:
                    _say(client, {"refused": error.refusal.name, "text": str(error)})
                    return
                except ValueError as error:
                    _say(client, {"refused": "BAD_REQUEST", "text": str(error)})
                    return
                _say(client, {"accepted": trigger.serial})
                while not answered.wait(0.2):
                    if self._stop.is_set():
                        return
                _say(client, _told(trigger, found[0]))
        finally:
            self._clients.release()

    def _read(self, client: socket.socket) -> Trigger:
        try:
            asked = json.loads(_line(client))
        except RecursionError as error:
            raise ValueError("an object is expected, not lists in lists") from error
        if not isinstance(asked, dict):
            raise ValueError("an object with serial and part_number is expected")
        texts = asked.get("serial", ""), asked.get("part_number", "")
        if not all(isinstance(text, str) and _is_unicode(text) for text in texts):
            raise ValueError("serial and part_number are texts")
        serial, number = texts
        return Trigger(serial, number or self._part_number, time.time_ns())


class StdinTrigger(Thread):
    """A line a part: `SERIAL [PART_NUMBER]`. Waits where a part is in work: a pipe keeps its lines,
    so nothing is refused and nothing is queued here. At the end of the input the gate ends.
    Bytes that are no UTF-8 become `\ufffd`: a part lies there, whatever its serial is."""

    name = "stdin"

    def __init__(self, gate: Gate, part_number: str, lines: TextIO | None = None) -> None:
        super().__init__(gate)
        self._part_number = part_number
        self._lines = lines or sys.stdin
        if isinstance(self._lines, io.TextIOWrapper):
            self._lines.reconfigure(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """The thread may be waiting for a line; it ends with the process."""
        self._stop.set()

    def step(self) -> None:
        line = self._lines.readline()
        if not line:
            self._gate.end("the input has ended")
            self._stop.set()
            return
        serial, _, number = line.strip().partition(" ")
        number = number.strip() or self._part_number
        while not self._stop.is_set():
            if self._gate.objection() is None:
                with contextlib.suppress(TriggerRefusedError):  # another source was quicker
                    self._gate.offer(Trigger(serial, number, time.time_ns()))
                    return
            self._stop.wait(0.02)


def ask(path: Path, serial: str, part_number: str, timeout_s: float) -> Iterator[dict[str, Any]]:
    """The lines that a station answers to one trigger. Raises TriggerError when it does not."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.settimeout(timeout_s)
            client.connect(str(path))
            _say(client, {"serial": serial, "part_number": part_number})
            with client.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    yield json.loads(line)
        except OSError as error:
            raise TriggerError(
                "the station does not answer",
                which=path,
                got=error.strerror or error,
                action="start it with `forge-station run`; its trigger must be `software`",
            ) from error
        except ValueError as error:
            raise TriggerError(
                "the trigger cannot be asked for",
                which=path,
                expected="a serial in Unicode, a timeout of 0 or more, a station that answers JSON",
                got=error,
            ) from error


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket() and _answers(path):
            raise TriggerError("another station listens on the socket", which=path)
        if path.is_socket():
            path.unlink()  # left by a station that was killed
        os.fchmod(listener.fileno(), 0o600)  # before bind: there is no moment with another mode
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MOST_CLIENTS)
        listener.settimeout(0.2)
    except TriggerError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise TriggerError(
            "the trigger socket cannot be made",
            which=path,
            expected="a path of at most 107 bytes in a folder of this user's",
            got=error.strerror or error,
        ) from error
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _line(client: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        piece = client.recv(MOST_BYTES)
        found += piece
        if not piece or len(found) > MOST_BYTES:
            raise ValueError(f"one line of JSON, at most {MOST_BYTES} bytes, is expected")
    return found


def _is_unicode(text: str) -> bool:
    """JSON can name half a character (`"\\ud800"`), which nothing can store or send."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _say(client: socket.socket, message: Mapping[str, Any]) -> None:
    client.sendall(json.dumps(message, ensure_ascii=False).encode() + b"\n")


def _told(trigger: Trigger, verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        told = {"serial": trigger.serial, "outcome": "ERROR"}
        return {**told, "reasons": ["INTERRUPTED"], "texts": [REASONS["INTERRUPTED"]]}
    return {
        "serial": verdict.serial,
        "outcome": verdict.outcome.value,
        "reasons": [reason.code for reason in verdict.reasons],
        "texts": [reason.text for reason in verdict.reasons],
        "result_id": verdict.result_id,
    }
