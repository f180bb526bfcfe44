"""The root of all errors of the product, and the error of data that breaks the contract.

It lives here because `contract` imports nothing else; `forge_station.errors` has the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class StationError(Exception):
    """Base of every error that this product raises on purpose.

    The message is composed: what went wrong, which thing (file, field, mark), what was expected,
    what was there instead, and what to do about it. `code` is the reason code of a verdict that
    ends because of this error.
    """

    code: ClassVar[str] = "STATION_ERROR"

    def __init__(
        self,
        what: str,
        *,
        which: object = None,
        expected: object = None,
        got: object = None,
        action: str | None = None,
    ) -> None:
        self.what = what
        self.which = which
        self.expected = expected
        self.got = got
        self.action = action
        super().__init__(_compose(what, which, expected, got, action))


def _compose(what: str, which: object, expected: object, got: object, action: str | None) -> str:
    text = what if which is None else f"{what} ({which})"
    details = []
    if expected is not None:
        details.append(f"expected {expected}")
    if got is not None:
        details.append(f"got {got}")
    if details:
        text = f"{text}: {', '.join(details)}"
    return text if action is None else f"{text}. {action[:1].upper()}{action[1:]}"


@dataclass(frozen=True)
class Fault:
    """A fault of a document: where (`products[2].kind`), what is there, what is allowed."""

    path: str
    got: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.path}: {self.got}; allowed: {self.allowed}"


class ContractError(StationError, ValueError):
    """Data that breaks the contract. `faults` lists every problem of a document, not the first."""

    code: ClassVar[str] = "CONTRACT_BROKEN"

    def __init__(
        self,
        what: str,
        *,
        which: object = None,
        expected: object = None,
        got: object = None,
        action: str | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.faults = tuple(faults)
        if self.faults:
            listed = "".join(f"\n  {fault}" for fault in self.faults)
            what_and_where = what if which is None else f"{what} ({which})"
            super().__init__(f"{what_and_where}: {len(self.faults)} problem(s){listed}")
            self.what, self.which = what, which
        else:
            super().__init__(what, which=which, expected=expected, got=got, action=action)


class ProductError(ContractError):
    """A part number that the line does not have, or none where the line has several."""

    code: ClassVar[str] = "UNKNOWN_PRODUCT"
