"""A row of the failure matrix, what a run of it found, and the table of all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mes import faults


@dataclass(frozen=True)
class Result:
    """Counts of one run. `faults` says what is wrong, empty when all is as expected.

    `committed`: messages whose `put` had returned. `lost`: such that never reached the consumer.
    `duplicated`: arrived more than once. None: the row does not count it.
    """

    committed: int | None = None
    delivered: int | None = None
    lost: int | None = None
    duplicated: int | None = None
    note: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One fault. `run(folder, short)` raises Skip where the machine cannot make it."""

    number: str
    fault: str
    expected: str
    run: Callable[[Path, bool], Result]
    needs_mosquitto: bool = True


class Skip(Exception):
    """The machine cannot make this fault, with the reason."""


@dataclass
class Checks:
    """Collects what is wrong: `checks.that(lost == 0, "lost ...")`."""

    faults: list[str] = field(default_factory=list)

    def that(self, holds: object, otherwise: str) -> None:
        """Note `otherwise` unless it holds."""
        if not holds:
            self.faults.append(otherwise)


def all_rows() -> tuple[Row, ...]:
    """Every row of every module `rows_*.py`, in the order of their numbers."""
    found: list[Row] = []
    for item in pkgutil.iter_modules(faults.__path__):
        if item.name.startswith("rows_"):
            found.extend(importlib.import_module(f"tests.mes.faults.{item.name}").ROWS)
    return tuple(sorted(found, key=lambda row: (int("".join(filter(str.isdigit, row.number)) or 0),
                                                row.number)))  # fmt: skip


def line_of(row: Row, result: Result | str, seconds: float) -> str:
    """One line of the table."""
    if isinstance(result, str):
        counts, state, note = ["-"] * 4, "SKIP", result
    else:
        figures = (result.committed, result.delivered, result.lost, result.duplicated)
        counts = ["-" if item is None else str(item) for item in figures]
        state = "FAIL" if result.faults else "ok"
        note = "; ".join([*result.faults, result.note]).strip("; ")
    cells = [f"{row.number:>4}", f"{row.fault:<44.44}", *(f"{item:>9}" for item in counts)]
    return "  ".join([*cells, f"{seconds:6.1f} s", f"{state:<4}", note])


_COLUMNS = ("committed", "delivered", "     lost", "duplicate", "    time", "    ", "note")
HEAD = "  ".join(["   #", f"{'fault':<44}", *_COLUMNS])


def to_dict(row: Row, result: Result | str, seconds: float) -> dict[str, object]:
    """For the JSON line."""
    if isinstance(result, str):
        return {"row": row.number, "skipped": result}
    return {
        "row": row.number,
        "ok": not result.faults,
        "committed": result.committed,
        "delivered": result.delivered,
        "lost": result.lost,
        "duplicated": result.duplicated,
        "seconds": round(seconds, 1),
        "note": result.note,
        "faults": list(result.faults),
    }


def chosen(rows: Sequence[Row], numbers: str | None) -> list[Row]:
    """The rows with these comma-separated numbers; all for None. ValueError for an unknown one."""
    if numbers is None:
        return list(rows)
    wanted = [item.strip() for item in numbers.split(",")]
    unknown = set(wanted) - {row.number for row in rows}
    if unknown:
        raise ValueError(f"no such row: {', '.join(sorted(unknown))}")
    return [row for row in rows if row.number in wanted]
