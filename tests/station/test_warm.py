"""Keep-warm: only in gaps, never beside a part, and a fault of it stops nothing."""

from __future__ import annotations

import threading
import time

import pytest

from forge_station.errors import ModelError
from forge_station.warm import KeepWarm


class Touches:
    """Counts touches; waits for a given number."""

    def __init__(self, fail: bool = False) -> None:
        self.count, self.fail = 0, fail
        self.beside: list[bool] = []
        self.busy = False
        self.changed = threading.Condition()

    def __call__(self) -> None:
        with self.changed:
            self.count += 1
            self.beside.append(self.busy)
            self.changed.notify_all()
        if self.fail:
            raise ModelError("no device")

    def reach(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.count >= count, timeout=30)


@pytest.mark.parametrize("fail", [False, True])
def test_a_gap_is_filled_again_and_again(fail):
    touches = Touches(fail)
    with KeepWarm(touches, 0.01):
        assert touches.reach(3)
    count = touches.count
    time.sleep(0.05)
    assert touches.count == count, "it ends with the run"


def test_no_touch_runs_beside_a_part():
    touches = Touches()
    with KeepWarm(touches, 0.005) as keep:
        for _ in range(5):
            with keep.part():
                touches.busy = True
                time.sleep(0.03)
                touches.busy = False
            assert touches.reach(touches.count + 1)
    assert touches.beside
    assert not any(touches.beside)


def test_parts_that_follow_each_other_leave_no_gap():
    touches = Touches()
    with KeepWarm(touches, 30.0) as keep:
        for _ in range(20):
            with keep.part():
                pass
    assert touches.count == 0


def test_zero_seconds_are_never():
    touches = Touches()
    with KeepWarm(touches, 0.0):
        time.sleep(0.05)
    assert touches.count == 0
