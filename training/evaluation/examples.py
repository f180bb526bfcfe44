"""References and solved examples for the settings `reference` and `demonstration`.

A reference is a picture of what is right for the very product that is judged: the case's own
`input.references`, else a passing case of the same product in the folder of examples. A solved
example is another case of the same task with its truth, one passing and one failing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge_station.contract.views import LARGE_LAYOUT
from forge_station.errors import InputError
from training.evaluation import case_input
from training.evaluation.case_files import Case, CaseInput, read_cases
from training.evaluation.pictures import Shown, shown_of


@dataclass(frozen=True)
class Examples:
    """Cases that may be shown beside others. `own`: folder of the judged cases."""

    own: Path
    folder: Path
    cases: tuple[Case, ...]

    @classmethod
    def of(cls, own: Path, folder: Path | None = None) -> Examples:
        """From a folder of its own, or, None, from that of the judged cases."""
        folder = folder or own
        return cls(own, folder, tuple(c for c in read_cases(folder) if isinstance(c, Case)))

    def references(self, case: Case, count: int, style: str) -> Iterator[Shown]:
        """`count` pictures of what is right for the product of `case`."""
        given = case.input.references[:count]
        for file in given:
            kind = (
                {"photo": file, "marks": case.input.marks} if case.input.photo else {"scene": file}
            )
            yield self._shown(replace(case, input=CaseInput(**kind)), self.own, style)
        left = count - len(given)
        found = self._turned(case, [other for other in self.cases if _same(other, case)])
        if len(found) < left:
            raise InputError(
                "too few references of this product",
                which="input.references",
                expected=f"{count}, its own or passing cases of the same product beside it",
                got=len(given) + len(found),
                action="make cases with training.cases --references 1",
            )
        for other in found[:left]:
            yield self._shown(other, self.folder, style)

    def solved(self, case: Case) -> list[tuple[Case, Path]]:
        """Two other cases of the task with their folder: one that passes, one that fails."""
        others = [o for o in self.cases if o.task == case.task and o.id != case.id]
        found = []
        for outcome in ("PASS", "FAIL"):
            pool = [other for other in others if other.truth.expected == outcome]
            if not pool:
                raise InputError(
                    "no solved example of this task",
                    which=self.folder,
                    expected=f"another case of the task {case.task} whose outcome is {outcome}",
                    action="name a folder with --examples",
                )
            found.append((self._turned(case, pool)[0], self.folder))
        return found

    def _shown(self, case: Case, folder: Path, style: str) -> Shown:
        return shown_of(case, case_input.look(case, folder, LARGE_LAYOUT), folder, style)

    @staticmethod
    def _turned(case: Case, pool: Sequence[Case]) -> list[Case]:
        """The pool from a place that depends on the case: the same on every run."""
        if not pool:
            return []
        start = zlib.crc32(case.id.encode()) % len(pool)
        return [*pool[start:], *pool[:start]]


def _same(other: Case, case: Case) -> bool:
    """A passing case of the same task and product."""
    if other.task != case.task or other.id == case.id or other.truth.expected != "PASS":
        return False
    a, b = other.product, case.product
    if a is None or b is None or (a.kind, dict(a.parts)) != (b.kind, dict(b.parts)):
        return False
    return bool(a.parts) or set(other.truth.readings.values()) == _majority(case)


def _majority(case: Case) -> set[str]:
    names = list(case.truth.readings.values())
    return {max(names, key=names.count)} if names else set()
