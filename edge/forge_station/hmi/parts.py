"""What the page reads of the evidence folder, and the marks that it sets there.

Each call opens the index anew, so that any thread may call. A folder that is not there is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from forge_station.contract.verdict import Verdict
from forge_station.errors import InputError
from forge_station.evidence.case import Case
from forge_station.evidence.folder import EvidenceError, Folder
from forge_station.evidence.index import Query, Row

CASE, VERDICT = ".case.npz", ".verdict.json"


class Evidence:
    """Of one station."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, query: Query) -> list[Row]:
        """The newest first."""
        if not self.folder.is_dir():
            return []
        with Folder(self.folder) as folder:
            return folder.find(query)[::-1]

    def one(self, result_id: str) -> Row | None:
        if not self.folder.is_dir():
            return None
        with Folder(self.folder) as folder:
            return folder.one(result_id)

    def reasons(self) -> list[str]:
        """Codes of all reasons that a verdict of the folder gives."""
        if not self.folder.is_dir():
            return []
        with Folder(self.folder) as folder:
            return folder.reasons()

    def since(self, time: str) -> list[Row]:
        """Parts of that time and later of which there are points to draw, the oldest first."""
        return [row for row in reversed(self.find(Query(since=time))) if _drawable(row)]

    def there(self, result_id: str) -> bool:
        """Whether the part can still be drawn."""
        row = self.one(result_id)
        return row is not None and _drawable(row) and (self.folder / f"{row.name}{CASE}").is_file()

    def keep(self, result_id: str, mark: Literal["labelled", "held"]) -> None:
        """Mark a part so that it stays longer; a stronger mark is left."""
        with Folder(self.folder) as folder:
            row = folder.one(result_id)
            if row is not None and row.label not in (mark, "held"):
                folder.mark(row, mark)

    def mark(self, result_id: str, mark: str) -> Row:
        """Set or take away the mark of a part. Raises EvidenceError when it is gone."""
        with Folder(self.folder) as folder:
            row = folder.one(result_id)
            if row is None:
                raise gone(result_id)
            return folder.mark(row, mark)

    def verdict(self, row: Row) -> dict[str, Any]:
        """`Verdict.to_dict()` of the part. Raises EvidenceError, ContractError."""
        path = self.folder / f"{row.name}{VERDICT}"
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise gone(row.result_id) from None
        except (OSError, ValueError, RecursionError) as error:
            raise EvidenceError("verdict cannot be read", which=path, got=error) from error
        return Verdict.from_dict(data).to_dict()

    def case(self, row: Row) -> Case:
        """What the part was judged by. Raises EvidenceError, InputError."""
        path = self.folder / f"{row.name}{CASE}"
        try:
            return Case.from_bytes(path.read_bytes(), path)
        except FileNotFoundError:
            raise gone(row.result_id) from None
        except OSError as error:
            raise InputError("case cannot be read", which=path, got=error.strerror) from error


def gone(result_id: str) -> EvidenceError:
    """The error of a part that is not there."""
    return EvidenceError("no evidence of this part", which=result_id, action="it was deleted")


def _drawable(row: Row) -> bool:
    return f"{row.name}{CASE}" in row.files


__all__ = ["Evidence", "gone"]
