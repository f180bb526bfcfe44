"""The gate and the simple sources: one part at a time, the rest is refused and told."""

from __future__ import annotations

import io
import json
import socket
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from forge_station.capture.base import Frame, Trigger
from forge_station.errors import CameraLostError, CameraTimeoutError, TriggerError
from forge_station.triggers import local, sources
from forge_station.triggers.gate import Gate, Refusal, TriggerRefusedError
from forge_station.triggers.local import SocketTrigger, StdinTrigger
from forge_station.triggers.sources import CameraTrigger, QueueTrigger, Serials, TimerTrigger
from tests.triggers.simulated_plc import verdict_of


def part(serial: str) -> Trigger:
    return Trigger(serial, "NUT")


@pytest.fixture
def told() -> list[tuple[str, Refusal]]:
    return []


@pytest.fixture
def gate(told) -> Gate:
    made = Gate(
        on_refused=lambda trigger, why, text: told.append((trigger.serial, why)),
        number=Serials("s1").next,
    )
    made.open()
    return made


def wait_for(condition, limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.005)


class TestGate:
    def test_takes_nothing_before_it_is_open(self):
        gate = Gate()
        with pytest.raises(TriggerRefusedError) as caught:
            gate.offer(part("a"))
        assert caught.value.refusal is Refusal.NOT_READY
        assert gate.take(0.0) is None

    def test_refuses_what_comes_while_a_part_is_in_work_and_never_keeps_it(self, gate, told):
        answers = []
        gate.offer(part("a"), answers.append)
        with pytest.raises(TriggerRefusedError, match="part a is in work"):
            gate.offer(part("b"), answers.append)
        assert gate.take(0.0) == part("a")
        with pytest.raises(TriggerRefusedError):
            gate.offer(part("c"))
        verdict = verdict_of("a")
        gate.finish(verdict)
        assert answers == [verdict] and gate.take(0.0) is None
        assert told == [("b", Refusal.BUSY), ("c", Refusal.BUSY)]
        counts = gate.counts()
        assert (counts.accepted, counts.answered, counts.refused) == (1, 1, {Refusal.BUSY: 2})

    def test_numbers_parts_without_a_serial_and_a_refused_one_takes_none(self, gate):
        for number in (1, 2):
            assert gate.offer(Trigger("", "NUT")).serial == f"s1-{number:06d}"
            with pytest.raises(TriggerRefusedError):
                gate.offer(Trigger("", "NUT"))
            assert gate.take(0.0).serial == f"s1-{number:06d}"
            gate.finish(None)
        assert gate.offer(part("own")).serial == "own"

    def test_a_queue_is_as_long_as_it_was_asked_for(self):
        gate = Gate(queue=2)
        gate.open()
        for name in "abc":
            gate.offer(part(name))
        with pytest.raises(TriggerRefusedError):
            gate.offer(part("d"))
        order = []
        for _ in range(3):
            order.append(gate.take(0.0).serial)
            gate.finish(verdict_of(order[-1]))
        assert order == ["a", "b", "c"]

    def test_shut_it_finishes_what_it_took(self, gate):
        gate.offer(part("a"))
        gate.end("the station stops")
        assert gate.take(0.0) == part("a")
        gate.finish(None)
        with pytest.raises(EOFError):
            gate.take(0.0)

    def test_what_is_given_up_is_answered_once(self):
        gate, answers = Gate(queue=1), []
        gate.open()
        gate.offer(part("a"), lambda verdict: answers.append(("a", verdict)))
        gate.offer(part("b"), lambda verdict: answers.append(("b", verdict)))
        gate.take(0.0)
        assert [item.serial for item in gate.give_up()] == ["a", "b"]
        gate.finish(verdict_of("a"))
        assert answers == [("a", None), ("b", None)] and gate.counts().answered == 2

    def test_a_source_that_is_gone_stops_nothing(self, gate):
        def gone(verdict):
            raise BrokenPipeError

        gate.offer(part("a"), gone)
        gate.take(0.0)
        gate.finish(verdict_of("a"))
        assert gate.objection() is None

    def test_many_threads_hand_in_one_part_at_a_time(self, gate):
        taken, refused = [], []
        stop = threading.Event()

        def source(name: str) -> None:
            for number in range(50):
                try:
                    gate.offer(part(f"{name}{number}"))
                except TriggerRefusedError:
                    refused.append(name)
                time.sleep(0.0005)

        def loop() -> None:
            while not stop.is_set() or gate.objection() is not None:
                found = gate.take(0.01)
                if found is not None:
                    taken.append(found.serial)
                    gate.finish(None)

        worker = threading.Thread(target=loop)
        worker.start()
        sources = [threading.Thread(target=source, args=(name,)) for name in "abcd"]
        for item in sources:
            item.start()
        for item in sources:
            item.join()
        stop.set()
        worker.join()
        assert len(taken) + len(refused) == 200 and len(set(taken)) == len(taken)
        assert gate.counts().accepted == len(taken)


def test_the_queue_of_commands_is_refused_like_any_other(gate):
    commands, answers = QueueTrigger(gate), []
    commands.put(part("a"), answers.append)
    with pytest.raises(TriggerRefusedError):
        commands.put(part("b"))
    gate.take(0.0)
    gate.finish(verdict_of("a"))
    assert answers == [verdict_of("a")]


def test_a_source_goes_on_after_a_fault_of_its_own(gate, monkeypatch):
    monkeypatch.setattr(sources, "FAULT_WAIT_S", 0.01)
    faults = [RuntimeError("can't start new thread"), ValueError("?")]

    class Faulty(sources.Thread):
        def step(self):
            if faults:
                raise faults.pop()
            self.offer(part("a"))
            self._stop.wait(20.0)

    with Faulty(gate):
        assert gate.take(20.0) == part("a")


class TestTimer:
    @pytest.mark.parametrize("period_s", [1.0, 60.0, 3600.0, 8 * 3600.0])
    def test_beats_at_its_period_on_a_simulated_clock(self, gate, period_s):
        now = [0.0]

        def wait(seconds: float) -> bool:
            now[0] += seconds
            return False

        timer = TimerTrigger(gate, "NUT", period_s, clock=lambda: now[0], wait=wait)
        beats = []
        for _ in range(3):
            timer.step()
            beats.append(now[0])
            found = gate.take(0.0)
            assert found.part_number == "NUT" and found.serial == f"s1-{len(beats):06d}"
            gate.finish(None)
        assert beats == pytest.approx([period_s, 2 * period_s, 3 * period_s])

    def test_a_beat_into_a_part_is_an_overrun_and_one_that_is_late_does_not_catch_up(
        self, gate, told
    ):
        now = [0.0]

        def wait(seconds: float) -> bool:
            now[0] += seconds
            return False

        timer = TimerTrigger(gate, "NUT", 1.0, clock=lambda: now[0], wait=wait)
        for _ in range(3):
            timer.step()
        assert told == [("", Refusal.BUSY), ("", Refusal.BUSY)]
        gate.take(0.0)
        gate.finish(None)
        now[0] = 100.5
        timer.step()
        timer.step()
        assert now[0] == pytest.approx(101.5)

    def test_runs_in_a_thread_and_ends(self, gate):
        with TimerTrigger(gate, "NUT", 0.01):
            assert gate.take(20.0) is not None
        assert not [t for t in threading.enumerate() if t.name == "timer"]


class FakeCamera:
    """A camera whose pulses a test sends; armed or not, as the head would find it."""

    def __init__(self) -> None:
        self.pulses: list[BaseException | int] = []
        self.armed: list[str] = []

    def arm(self, trigger, count=None, **settings) -> None:
        self.armed.append(trigger)

    def disarm(self) -> None:
        self.armed.append("off")

    def grab(self, timeout_s: float) -> Frame:
        if not self.pulses:
            time.sleep(0.002)
            raise CameraTimeoutError("no pulse")
        found = self.pulses.pop(0)
        if isinstance(found, BaseException):
            raise found
        return Frame(np.zeros((4, 4), np.uint8), 1, t_utc_ns=found)


class TestCameraLine:
    def test_a_pulse_is_a_part_and_the_camera_is_free_while_it_is_in_work(self, gate):
        camera = FakeCamera()
        source = CameraTrigger(gate, "NUT", camera)  # type: ignore[arg-type]
        with source:
            camera.pulses.append(1234)
            found = gate.take(20.0)
            assert found == Trigger("s1-000001", "NUT", 1234)
            assert camera.armed == ["hardware", "off"]
            time.sleep(0.02)
            assert camera.armed == ["hardware", "off"], "left to the head"
            gate.finish(None)
            wait_for(lambda: camera.armed[-1] == "hardware")
            camera.pulses.append(5678)
            assert gate.take(20.0).t_utc_ns == 5678
            gate.finish(None)
        assert camera.armed[-1] == "off"

    def test_a_camera_that_was_lost_is_waited_for(self, gate):
        camera = FakeCamera()
        camera.pulses += [CameraLostError("unplugged"), 99]
        with CameraTrigger(gate, "NUT", camera):  # type: ignore[arg-type]
            assert gate.take(20.0).t_utc_ns == 99
            gate.finish(None)


class TestStdin:
    def test_a_line_a_part_and_the_end_is_the_end(self, gate, told):
        lines = io.StringIO("a\nb KIT\n\n")
        with StdinTrigger(gate, "NUT", lines):
            found = []
            for _ in range(3):
                item = gate.take(20.0)
                found.append((item.serial, item.part_number))
                gate.finish(None)
            with pytest.raises(EOFError):
                gate.take(20.0)
        assert found == [("a", "NUT"), ("b", "KIT"), ("s1-000001", "NUT")]
        assert told == [], "a pipe waits, nothing is refused"

    def test_bytes_that_are_no_text_are_a_part_all_the_same(self, gate):
        lines = io.TextIOWrapper(io.BytesIO(b"\xff7 KIT\nb\n"), "ascii", "surrogateescape")
        with StdinTrigger(gate, "NUT", lines):
            assert (gate.take(20.0).serial, gate.finish(None)) == ("\ufffd7", None)
            assert gate.take(20.0).serial == "b"


class TestSocket:
    @pytest.fixture
    def path(self, tmp_path) -> Path:
        return tmp_path / "t.sock"

    @pytest.fixture
    def source(self, gate, path):
        with SocketTrigger(gate, "NUT", path) as source:
            yield source

    def asked(self, path: Path, serial: str, number: str = "") -> list[dict[str, object]]:
        return list(local.ask(path, serial, number, 20.0))

    def test_answers_with_the_verdict(self, source, gate, path):
        found: list[dict[str, object]] = []
        client = threading.Thread(target=lambda: found.extend(self.asked(path, "x3", "KIT")))
        client.start()
        trigger = gate.take(20.0)
        assert (trigger.serial, trigger.part_number) == ("x3", "KIT") and trigger.t_utc_ns
        verdict = verdict_of("x3")
        gate.finish(verdict)
        client.join(20.0)
        assert found[0] == {"accepted": "x3"}
        assert found[1]["outcome"] == verdict.outcome.value
        assert found[1]["result_id"] == "result-of-x3"

    def test_says_why_it_refuses(self, source, gate, path, told):
        gate.offer(part("a"))
        (answer,) = self.asked(path, "b")
        assert answer["refused"] == "BUSY" and told == [("b", Refusal.BUSY)]

    def test_gives_a_number_to_a_part_without_serial(self, source, gate, path):
        client = threading.Thread(target=lambda: self.asked(path, ""))
        client.start()
        assert gate.take(20.0).serial == "s1-000001"
        gate.finish(None)
        client.join(20.0)

    @pytest.mark.parametrize(
        "line",
        [
            b"hello\n", b"[1]\n", b'{"serial": 5}\n', b"x" * 5000 + b"\n", b"\xff\n", b"",
            b"[" * 4000 + b"\n", b'{"serial": "\\ud800"}\n', b'{"part_number": "\\udfff"}\n',
        ],
    )  # fmt: skip
    def test_nonsense_is_refused_and_the_next_is_served(self, source, gate, path, line):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20.0)
            client.connect(str(path))
            client.sendall(line)
            client.shutdown(socket.SHUT_WR)
            answer = client.makefile().readline()
        assert json.loads(answer)["refused"] == "BAD_REQUEST"
        gate.offer(part("a"))
        assert self.asked(path, "b")[0]["refused"] == "BUSY"

    @pytest.mark.parametrize(
        ("serial", "timeout_s"), [("\udcff", 20.0), ("a", -1.0), ("a", float("nan"))]
    )
    def test_what_cannot_be_asked_is_one_error(self, source, path, serial, timeout_s):
        with pytest.raises(TriggerError, match="cannot be asked"):
            list(local.ask(path, serial, "", timeout_s))

    def test_an_answer_that_is_none_is_one_error(self, path):
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.bind(str(path))
            foreign.listen()

            def answer() -> None:
                with foreign.accept()[0] as client:
                    client.recv(1000)
                    client.sendall(b"HTTP/1.1 400\n")

            threading.Thread(target=answer, daemon=True).start()
            with pytest.raises(TriggerError, match="cannot be asked"):
                self.asked(path, "a")

    def test_only_this_user_may_open_it(self, source, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_a_socket_left_by_a_killed_station_is_replaced_that_of_a_live_one_is_not(
        self, gate, path
    ):
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()
        second = SocketTrigger(gate, "NUT", path)
        with (
            SocketTrigger(gate, "NUT", path),
            pytest.raises(TriggerError, match="another station listens"),
        ):
            second.start()
        assert not path.exists()

    def test_without_a_station_there_is_one_clear_error(self, path):
        with pytest.raises(TriggerError, match="forge-station run"):
            self.asked(path, "a")
        with pytest.raises(TriggerError, match="107 bytes"):
            SocketTrigger(Gate(), "", path.with_name("x" * 200)).start()
