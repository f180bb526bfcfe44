"""A run over cases: in order, in parallel, resumable; every row is on disk as soon as it is there.

Knows rows and cases, not who answers them. A row is kept on a second run when its case's line and
the run's digest (model, settings, code) are the same.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
from tqdm import tqdm

import forge_station
from forge_station.contract.error import StationError
from training.evaluation import by_station
from training.evaluation.by_station import Settings
from training.evaluation.case_files import BadCase, Case
from training.evaluation.case_row import digest_of
from training.evaluation.rows import Row, read_rows, write_row

Answer = Callable[[Case | BadCase], Row]
Mapper = Callable[[Sequence[Case | BadCase]], Iterable[Row]]
# Modules that only count or show what was answered: a change there spoils no row.
_FIGURES_ONLY = frozenset(
    {
        "html", "measures", "paired", "published", "reliability", "report", "run", "scoring", "svg",
        "surface_figures", "tray_figures", "worst",
    }
)  # fmt: skip


def run_digest(about: Mapping[str, Any]) -> str:
    """16 hex digits of who answers, how, and by which code."""
    told = json.dumps({**about, "code": _code_digest()}, sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _code_digest() -> str:
    total = hashlib.sha256()
    station = Path(forge_station.__file__).parent
    own = [p for p in Path(__file__).parent.glob("*.py") if p.stem not in _FIGURES_ONLY]
    for path in sorted([*station.rglob("*.py"), *own]):
        total.update(path.read_bytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Ran:
    """Rows in the order of the cases, and how many of them were there already."""

    rows: list[Row]
    kept: int


def run(
    cases: Sequence[Case | BadCase],
    mapper: Mapper,
    out: Path,
    digest: str,
    *,
    fresh: bool = False,
    quiet: bool = False,
) -> Ran:
    """Answer the cases that `out` lacks. `fresh`: all of them."""
    known = {} if fresh else _known(out, digest)
    marked = [(case, digest_of(case)) for case in cases]
    todo = [case for case, own in marked if (case.id, own) not in known]
    kept = [known[case.id, own] for case, own in marked if (case.id, own) in known]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text("".join(f"{write_row(row)}\n" for row in kept), encoding="utf-8")
    partial.replace(out)
    found = dict(known)
    bar = tqdm(total=len(cases), initial=len(kept), desc="evaluate", unit="case", disable=quiet)
    with bar, out.open("a", encoding="utf-8") as file:
        for row in mapper(todo):
            row = replace(row, run=digest)
            if row.error:
                tqdm.write(f"ERROR {row.error}", file=sys.stderr)
            file.write(f"{write_row(row)}\n")
            file.flush()
            found[row.id, row.case] = row
            bar.update()
    rows = [found[case.id, own] for case, own in marked]
    if kept and todo:  # in the order of the cases again
        partial.write_text("".join(f"{write_row(row)}\n" for row in rows), encoding="utf-8")
        partial.replace(out)
    return Ran(rows, len(kept))


def _known(out: Path, digest: str) -> dict[tuple[str, str], Row]:
    """Rows of the same run without an error; a file of an older format counts as none."""
    if not out.exists():
        return {}
    try:
        rows = read_rows(out)
    except StationError:
        return {}
    return {(row.id, row.case): row for row in rows if row.run == digest and not row.error}


def selected(cases: Sequence[Case | BadCase], limit: int | None) -> list[Case | BadCase]:
    """At most `limit` cases of every task, in file order."""
    taken: Counter[str] = Counter()
    chosen = []
    for case in cases:
        taken[case.task] += 1
        if limit is None or taken[case.task] <= limit:
            chosen.append(case)
    return chosen


def one_by_one(answer: Answer) -> Mapper:
    """In this process, in order."""
    return lambda cases: map(answer, cases)


def in_threads(answer: Answer, jobs: int) -> Mapper:
    """For answers that wait for somebody else; in order."""

    def mapper(cases: Sequence[Case | BadCase]) -> Iterator[Row]:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield from pool.map(answer, cases)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    return mapper


@contextmanager
def in_processes(bundle: Path, threads: int, settings: Settings, jobs: int) -> Iterator[Mapper]:
    """`jobs` processes that each open the bundle; in order."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _open, (bundle, threads, settings)) as pool:
        yield lambda cases: pool.imap(_answer, cases)


_OPENED: dict[str, Any] = {}


def _open(bundle: Path, threads: int, settings: Settings) -> None:
    cv2.setNumThreads(max(1, threads))
    _OPENED["inspector"] = by_station.opened(bundle, threads, settings)
    _OPENED["settings"] = settings


def _answer(case: Case | BadCase) -> Row:
    return by_station.run_case(_OPENED["inspector"], case, _OPENED["settings"])
