"""Keeps evidence beside the line: a thread that draws and writes after the verdict is out.

`keep` only hands over. When the disk is slow, full or read-only, evidence is dropped and counted,
never queued without bound; the inspection does not wait for it and does not end because of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from forge_station.capture.replay import Recording
from forge_station.config import EvidenceConfig
from forge_station.contract.verdict import Outcome
from forge_station.contract.views import Layout
from forge_station.evidence.case import Case
from forge_station.evidence.files import default_name, inputs_of
from forge_station.evidence.folder import Bundle, EvidenceError, Folder
from forge_station.evidence.pictures import picture_of
from forge_station.mes.health import EvidenceFacts
from forge_station.pipeline import Inspection

log = logging.getLogger(__name__)

MOST_PARTS, MOST_BYTES = 8, 256 << 20
"""So much may wait to be written; one part may be larger when it is alone."""
IDLE_S = 1.0
CARE_S = 60.0
"""So often age and free space are looked at while no part comes."""
CLOSE_S = 10.0
"""The end of the station waits so long for what is still to be written."""


@dataclass(frozen=True)
class Item:
    """One part to keep."""

    inspection: Inspection
    layout: Layout
    case: Case
    stack: Recording | None = None

    @property
    def bytes(self) -> int:
        """What it takes in memory, about."""
        points = sum(part.points.nbytes for part in self.inspection.parts)
        return points + (
            sum(one.images.nbytes for one in self.stack.stacks) if self.stack is not None else 0
        )


class Keeper:
    """A context manager. `keep` and `facts` may be called from any thread, and never wait."""

    def __init__(self, settings: EvidenceConfig, folder: Folder | None = None) -> None:
        self._settings = settings
        self._folder = folder or Folder.of(settings)
        self._waiting: deque[Item] = deque()
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._ending: float | None = None
        self._busy = False
        self._dropped = 0
        self._fault: str | None = None
        self._parts = self._bytes = 0
        self._deleted: Mapping[str, int] = {}
        self._reconciled = False
        self._thread = threading.Thread(target=self._run, name="evidence", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Write what waits, `wait_s` at most; what is not written then is lost, and logged."""
        with self._changed:
            self._ending = time.monotonic() + wait_s
            self._changed.notify_all()
        self._thread.join(wait_s + IDLE_S)
        left = len(self._waiting) + self._busy
        if left:
            log.error("evidence of %d parts is not written: the disk is too slow", left)

    def wants_stack(self, outcome: Outcome) -> bool:
        """Whether the pattern images of a part are to be kept."""
        wanted = self._settings.stacks
        return wanted == "always" or (wanted == "fail" and outcome is not Outcome.PASS)

    def keep(self, item: Item) -> bool:
        """Hand over one part; False: there is no room among those that wait, it is dropped.

        Without its pattern images it may still fit; then only they are dropped.
        """
        with self._changed:
            if not self._fits(item) and item.stack is not None:
                item = replace(item, stack=None)
                self._fault = "the disk does not keep up: pattern images are dropped"
            if self._ending is not None or not self._fits(item):
                self._dropped += 1
                self._fault = "the disk does not keep up: evidence is dropped"
                return False
            self._waiting.append(item)
            self._held_bytes += item.bytes
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written or dropped; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def facts(self) -> EvidenceFacts:
        """How it stands, as far as the thread has looked."""
        return EvidenceFacts(
            parts=self._parts,
            bytes=self._bytes,
            quota_bytes=int(self._settings.quota_gb * 1e9),
            deleted=self._deleted,
            dropped=self._dropped,
            waiting=len(self._waiting),
            fault=self._fault,
        )

    def _fits(self, item: Item) -> bool:
        if not self._waiting:
            return True
        return len(self._waiting) < MOST_PARTS and self._held_bytes + item.bytes <= MOST_BYTES

    # The one thread

    def _run(self) -> None:
        cared_at = 0.0
        while True:
            item = self._next()
            if item is not None:
                self._write(item)
            elif self._ending is not None:
                break
            elif time.monotonic() - cared_at >= CARE_S or not self._reconciled:
                self._care()
                cared_at = time.monotonic()
        self._folder.close()

    def _next(self) -> Item | None:
        with self._changed:
            if not self._waiting and self._ending is None:
                self._changed.wait(IDLE_S)
            if not self._waiting or self._late():
                return None
            item = self._waiting.popleft()
            self._held_bytes -= item.bytes
            self._busy = True
            return item

    def _late(self) -> bool:
        return self._ending is not None and time.monotonic() > self._ending

    def _write(self, item: Item) -> None:
        serial = item.case.job.serial
        try:
            self._folder.add(_content(item))
            fault = None
        except EvidenceError as error:
            fault = str(error)
        except Exception as error:  # a fault of the drawing stops nothing
            log.exception("part %s: its evidence failed", serial)
            fault = f"evidence not drawn: {error!r}"
        if fault is not None:
            log.warning("part %s: %s", serial, fault)
        self._look()
        with self._changed:
            self._fault = fault
            self._dropped += fault is not None
            self._busy = False
            self._changed.notify_all()

    def _care(self) -> None:
        """While no part comes: what a crash left, what is too old, room that others took."""
        try:
            if self._folder.path.is_dir():
                if not self._reconciled:
                    self._folder.reconcile()
                self._folder.expire()
                self._folder.make_room()
                self._look()
        except (EvidenceError, OSError) as error:
            log.warning("evidence: %s", error)
        self._reconciled = True

    def _look(self) -> None:
        try:
            totals = self._folder.totals()
        except EvidenceError:
            return
        self._parts, self._bytes = sum(totals.parts.values()), totals.bytes
        self._deleted = totals.deleted


def _content(item: Item) -> Bundle:
    """Files in the order of their worth: the disk may end."""
    found = item.inspection
    name = default_name(found.verdict)
    files = {
        f"{name}.case.npz": item.case.to_bytes(),
        **inputs_of(found, name),
        f"{name}.png": picture_of(found, item.layout),
    }
    return Bundle(found.verdict.to_dict(), files, item.stack)


__all__ = ["Item", "Keeper"]
