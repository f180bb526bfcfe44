"""What a rollout looks like in a terminal: news as they come, and a table of all stations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TextIO

from forge_station.rollout.record import OVER, RolloutRecord, StationRecord
from forge_station.rollout.ways import Seen

_HEAD = ("group", "station", "release", "rollout", "station says", "shadow", "trial", "")


def table(found: RolloutRecord, seen: Mapping[str, Seen], waits_for: str = "") -> str:
    """One row a station, groups in their order; then what the whole is at."""
    rows = [_HEAD, *(_row(item, seen.get(item.name)) for item in found.stations)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    state = found.phase if found.phase in OVER else f"{found.phase}, group {found.group + 1}"
    end = found.why or (f"waits for {waits_for}" if waits_for else "")
    return "\n".join([*(line.rstrip() for line in lines), f"{found.id}  {state}  {end}".rstrip()])


def _row(item: StationRecord, seen: Seen | None) -> tuple[str, ...]:
    share = "" if item.progress is None else f" {100 * item.progress:.0f} %"
    away = " (offline)" if seen is not None and seen.online is False else ""
    away += " (unsigned)" if item.unsigned else ""
    shadow = f"{item.shadow[1]} of {item.shadow[0]} differ" if item.shadow else "-"
    trial = "-"
    if item.trial:
        parts, fail, unsure, slow = item.trial
        trial = f"{parts}: {fail} FAIL, {unsure} UNSURE, {slow} slow"
    why = ": ".join(text for text in (item.code, item.detail) if text)
    return (
        item.group,
        item.name,
        str(item.release.release_counter),
        item.step,
        f"{item.state or '-'}{share}{away}",
        shadow,
        trial,
        why if len(why) <= 100 else f"{why[:97]}...",
    )


class Screen:
    """Prints news, one a line. On a terminal the table stands below them and is kept up to date;
    else it is printed at the end."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._live = out.isatty()
        self._drawn = 0
        self._last = ""

    def news(self, text: str, station: str) -> None:
        """Something happened at a station, or (without one) to the whole."""
        self._wipe()
        now = time.strftime("%H:%M:%S")
        print(f"{now}  {station or '--':<24} {text}", file=self.out, flush=True)

    def show(self, found: RolloutRecord, seen: Mapping[str, Seen], waits_for: str) -> None:
        """The table as it is now."""
        text = table(found, seen, waits_for)
        over = found.phase in OVER
        if self._live and (text != self._last or not self._drawn):
            self._wipe()
            width = shutil.get_terminal_size().columns
            lines = [line[:width] for line in text.split("\n")]
            print("\n".join(lines), file=self.out, flush=True)
            self._drawn = len(lines)
        elif not self._live and over:
            print(text, file=self.out, flush=True)
        elif not self._live and waits_for and waits_for.partition(" (")[0] != self._last:
            print(f"{time.strftime('%H:%M:%S')}  waits for {waits_for}", file=self.out, flush=True)
        self._last = text if self._live else waits_for.partition(" (")[0]

    def _wipe(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="", file=self.out)
            self._drawn = 0
