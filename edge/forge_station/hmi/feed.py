"""What the station says, followed: its board, its alarms and the part in work, as events for pages.

Files are looked at twenty times a second; nothing is locked, and nobody waits for a page. A page
that does not keep up loses its queue and gets a snapshot: it never shows an old part for the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from forge_station import board
from forge_station.config import StationConfig
from forge_station.hmi.shift import Shift, begin_of
from forge_station.mes.stamp import utc_now

log = logging.getLogger(__name__)

LOOK_S = 0.05
BEAT_S = 1.0
BLIND_S = 1.0
"""After so long without a look there is no beat."""
MOST_QUEUED = 32
MOST_CLIENTS = 64
SHOWN = 20
"""Parts that a page shows."""
PICTURE_S = 30.0
"""So long after a part its pictures are waited for."""
_MOST_READ = 8 << 20
_TEXTS = ("id", "name", "outcome", "begin", "end")
"""What must be told of a part."""


@dataclass(frozen=True)
class Event:
    """One server-sent event, as its bytes."""

    name: str
    text: bytes


class Client:
    """One open page. `next` gives what to send; after an overflow that is one snapshot."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._queue: deque[Event] = deque()
        self._waiting = asyncio.Event()
        self._behind = True

    def put(self, event: Event) -> None:
        if self._behind and event.name != "beat":
            return  # the snapshot will have it
        self._queue.append(event)
        if len(self._queue) > MOST_QUEUED:
            self._queue.clear()
            self._behind = True
        self._waiting.set()

    async def next(self) -> bytes:
        """Waits for the next event."""
        while not self._behind and not self._queue:
            self._waiting.clear()
            await self._waiting.wait()
        if self._behind:
            self._behind = False
            self._queue.clear()
            return self._feed.event("snapshot", self._feed.snapshot()).text
        return self._queue.popleft().text


@dataclass
class Feed:
    """Reads only. One event loop; `followed` runs it, `subscribe` adds a page."""

    outbox: Path
    evidence: Path
    shifts: tuple[str, ...] = ("00:00",)
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    """Of this process: a page that finds another one loads itself anew."""

    def __post_init__(self) -> None:
        self.folder = board.folder_of(self.outbox)
        self._alarms_path = self.outbox.with_name(f"{self.outbox.name}.alarms.json")
        self._work_path = self.outbox.with_name(f"{self.outbox.name}.part.json")
        self._clients: set[Client] = set()
        self._parts: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self._pictures: dict[str, list[dict[str, str]]] = {}
        self._awaited: dict[str, float] = {}
        self._status: dict[str, Any] | None = None
        self._alarms: list[dict[str, Any]] = []
        self._work: dict[str, Any] | None = None
        self._stamps: dict[Path, tuple[int, int] | None] = {}
        self._status_at: float | None = None
        self._seq = self._beats = 0
        self._looked_at = time.monotonic()
        self._blind = False
        self._tail = _Tail(self.folder)
        self._shift = Shift(self._shift_begin())

    @classmethod
    def of(cls, config: StationConfig) -> Feed:
        return cls(config.outbox, config.evidence.folder, config.hmi.shifts)

    # Pages

    def subscribe(self) -> Client | None:
        """A new page, whose first event is a snapshot; None: too many are open."""
        if len(self._clients) >= MOST_CLIENTS:
            return None
        client = Client(self)
        self._clients.add(client)
        return client

    def unsubscribe(self, client: Client) -> None:
        self._clients.discard(client)

    @property
    def clients(self) -> int:
        return len(self._clients)

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows."""
        return {
            "boot": self.boot,
            "beat": self._beats,
            "time": utc_now(),
            "parts": list(self._parts)[::-1],
            "pictures": self._pictures,
            "shift": self._shift.facts(),
            "station": self._status,
            "silent_s": self._silent_s(),
            "alarms": self._alarms,
            "work": self._work,
        }

    def event(self, name: str, data: object) -> Event:
        """With the id `<boot>.<seq>`."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return Event(name, f"event: {name}\nid: {self.boot}.{self._seq}\ndata: {text}\n\n".encode())

    def part(self, result_id: str) -> dict[str, Any] | None:
        """One of the parts that are shown."""
        return next((part for part in self._parts if part["id"] == result_id), None)

    def newest(self) -> str:
        """Id of the part whose verdict is on the screens; empty: there was none. Of any thread."""
        shown = tuple(self._parts)
        return str(shown[-1]["id"]) if shown else ""

    def _tell(self, name: str, data: object) -> None:
        if name != "beat":
            self._seq += 1
        event = self.event(name, data)
        for client in tuple(self._clients):
            client.put(event)

    # Following

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow the station while the block runs."""
        await asyncio.to_thread(self._begin)
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """What went through before the page was started: the shift, and the last parts."""
        since = self._shift.begin.astimezone(timezone.utc)
        try:
            day_ago = datetime.now(timezone.utc) - timedelta(hours=24)
            for line in self._tail.since(min(since, day_ago)):
                self._take(line)
        except OSError as error:
            log.error("what went through before cannot be read: %s", error)
        self._parts_seen()
        self._look()

    async def _follow(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        try:
            self.look()
            self._looked_at = time.monotonic()
            self._blind = False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            if not self._blind:
                log.exception("the station cannot be followed; pages will say so")
            self._blind = True

    async def _beat(self) -> None:
        """None while the station is not followed: the pages cover themselves."""
        while True:
            if time.monotonic() - self._looked_at < BLIND_S:
                self._beats += 1
                facts = {"n": self._beats, "time": utc_now(), "silent_s": self._silent_s()}
                self._tell("beat", facts)
            await asyncio.sleep(BEAT_S)

    def look(self) -> None:
        """Tell of everything that is new."""
        begin = self._shift_begin()
        if begin != self._shift.begin:
            self._shift = Shift(begin)
            self._tell("shift", self._shift.facts())
        for line in self._tail.new():
            if self._take(line):
                self._tell("part", {"part": line, "shift": self._shift.facts()})
        self._look_for_pictures()
        status = self._changed(self.folder / board.STATUS)
        if status is not None:
            self._status, self._status_at = status, time.monotonic() - self._age()
            self._tell("station", status)
        alarms = self._changed(self._alarms_path)
        if alarms is not None:
            self._alarms = list(_shown_alarms(alarms))
            self._tell("alarms", self._alarms)
        work = self._changed(self._work_path)
        if work is not None:
            serial = work.get("serial")
            self._work = {"serial": serial, "since": work.get("begin_time")} if serial else None
            self._tell("work", self._work)

    def _take(self, part: dict[str, Any]) -> bool:
        """Show a part and count it; False for one that is shown already."""
        if self.part(part["id"]) is not None:
            return False
        self._parts.append(part)
        self._shift.add(part)
        known = {item["id"] for item in self._parts}
        self._pictures = {key: item for key, item in self._pictures.items() if key in known}
        self._awaited = {key: item for key, item in self._awaited.items() if key in known}
        self._awaited[part["id"]] = time.monotonic()
        return True

    def _parts_seen(self) -> None:
        for part in self._parts:
            self._find_pictures(part)

    def _look_for_pictures(self) -> None:
        now = time.monotonic()
        for part in tuple(self._parts):
            begun = self._awaited.get(part["id"])
            if begun is None:
                continue
            if self._find_pictures(part):
                self._tell("picture", {"id": part["id"], "marks": self._pictures[part["id"]]})
            elif now - begun > PICTURE_S:
                del self._awaited[part["id"]]

    def _find_pictures(self, part: dict[str, Any]) -> bool:
        """Whether its pictures are there now. The file that lists them comes after them."""
        try:
            text = (self.evidence / f"{part['name']}.input.json").read_bytes()
            listed = json.loads(text)["pictures"]
            marks = [{"mark": item.get("mark", ""), "file": item["file"]} for item in listed]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        self._pictures[part["id"]] = marks
        self._awaited.pop(part["id"], None)
        return True

    def _changed(self, path: Path) -> dict[str, Any] | None:
        """The JSON object of a file that was replaced since the last look; None otherwise."""
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamps.get(path):
                return None
            content = json.loads(path.read_bytes(), parse_constant=_refused)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            content = None
        self._stamps[path] = stamp
        return content if isinstance(content, dict) else None

    def _age(self) -> float:
        """Seconds since the status was written."""
        try:
            return max(0.0, time.time() - (self.folder / board.STATUS).stat().st_mtime)
        except OSError:
            return 0.0

    def _silent_s(self) -> float | None:
        """Since the station has said how it is; None when it never has."""
        if self._status_at is None:
            return None
        return round(time.monotonic() - self._status_at, 1)

    def _shift_begin(self) -> datetime:
        return begin_of(datetime.now().astimezone(), self.shifts)


class _Tail:
    """The lines of the board's files of days, each once. A day may come again, or be one of the
    future: clocks are set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._day = ""
        self._offset = 0
        self._rest = b""
        self._left: dict[str, tuple[int, bytes]] = {}
        """Day -> how far it was read."""

    def since(self, begin: datetime) -> Iterator[dict[str, Any]]:
        """All lines of the days from `begin` (UTC) on; then `new` goes on."""
        first = f"parts-{begin:%Y-%m-%d}.jsonl"
        days = sorted(path.name for path in self._folder.glob("parts-*.jsonl"))
        for day in days:
            if day >= first:
                self._turn_to(day)
                yield from self._read()

    def new(self) -> Iterator[dict[str, Any]]:
        """Lines that were not there before."""
        yield from self._read()
        today = f"parts-{datetime.now(timezone.utc):%Y-%m-%d}.jsonl"
        if today != self._day and (self._folder / today).exists():
            yield from self._read()  # written before midnight, after the look above
            self._turn_to(today)
            yield from self._read()

    def _turn_to(self, day: str) -> None:
        self._left[self._day] = self._offset, self._rest
        self._day = day
        self._offset, self._rest = self._left.get(day, (0, b""))

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self._day:
            return
        path = self._folder / self._day
        try:
            size = path.stat().st_size
            if size < self._offset:  # another file of the same name
                self._offset, self._rest = 0, b""
            while self._offset < size:
                with path.open("rb") as file:
                    file.seek(self._offset)
                    content = file.read(_MOST_READ)
                if not content:  # cut off meanwhile
                    return
                self._offset += len(content)
                *lines, self._rest = (self._rest + content).split(b"\n")
                for line in lines:
                    part = _part(line)
                    if part is not None:
                        yield part
        except FileNotFoundError:
            return


def _part(line: bytes) -> dict[str, Any] | None:
    """A line of the board; None for one that is none: half a line, of a process that was killed."""
    try:
        part = json.loads(line, parse_constant=_refused)
        good = (
            isinstance(part, dict)
            and all(isinstance(part.get(key), str) for key in _TEXTS)
            and math.isfinite(part["ms"])
            and all(isinstance(item["code"], str) for item in part["reasons"])
            and isinstance(part["checks"], dict)
            and all(len(cell) == 2 for item in part["grids"] for cell in item["cells"])
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        good = False
    if not good:
        if line.strip():
            log.warning("a line of the board cannot be read: %s", line[:80])
        return None
    return dict(part)


def _refused(constant: str) -> None:
    """NaN and infinity are no JSON, and no browser reads them."""
    raise ValueError(constant)


def _shown_alarms(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Active alarms: not acknowledged ones first, the most severe first, then the oldest."""
    listed = content.get("alarms")
    keys = ("code", "key", "text", "severity", "since", "instance_id", "acked")
    found = [
        {key: item.get(key) for key in keys}
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict) and item.get("told") != "clearing"
    ]
    yield from sorted(
        found,
        key=lambda item: (bool(item["acked"]), -_number(item["severity"]), str(item["since"])),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


__all__ = ["BEAT_S", "MOST_QUEUED", "Client", "Feed"]
