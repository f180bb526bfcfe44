"""The accuracy gate: a bundle and the same checkpoint in full precision, over the same cases.

Both are evaluated by `python -m training.evaluate` in processes of their own (export and training
meet in files only); rows stay in a folder beside the bundle, so that an interrupted gate goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export.drift import LIMITS, Drift, Limits, compare, read_rows
from forge_station.contract.manifest import MANIFEST_NAME
from forge_station.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


class Degraded(InputError):
    """The bundle is over a limit, and nobody accepted that by name."""


@dataclass(frozen=True)
class Gate:
    """`write_full` writes the full-precision bundle into the folder that it is given.

    `folder` keeps rows, and that bundle under the name `full`.
    """

    write_full: Callable[[Path], object]
    cases: Path
    folder: Path
    full: str = "full"
    references: str = "bundle"
    accepted: str = ""
    limits: Limits = LIMITS

    def judge(self, bundle: Path) -> Drift:
        """What changed. Raises Degraded over a limit, unless there is a reason to accept it."""
        full = self.folder / self.full
        if not (full / MANIFEST_NAME).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write_full(full)
        before = evaluate(full, self.cases, self.folder / "full.jsonl", self.references)
        after = evaluate(bundle, self.cases, self.folder / "own.jsonl", self.references)
        drift = compare(read_rows(before), read_rows(after), self.limits)
        faults = drift.faults()
        if faults and not self.accepted:
            raise Degraded(
                "the bundle does not answer as full precision does; it is not written",
                which=self.cases,
                got="; ".join(faults),
                action="take a higher precision or another quantizer, or give --accept-degraded "
                f"REASON, which the model card will show (rows: {self.folder})",
            )
        return drift.accept(self.accepted) if faults else drift


def evaluate(bundle: Path, cases: Path, rows: Path, references: str) -> Path:
    """Rows of a bundle over a folder of cases. Raises InputError where that fails."""
    command = [
        sys.executable, "-m", "training.evaluate", "--bundle", str(bundle), "--cases", str(cases),
        "--out", str(rows), "--references", references,
    ]  # fmt: skip
    paths = [str(ROOT / "edge"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False)
    if done.returncode != 0:
        raise InputError(
            "the bundle cannot be evaluated",
            which=bundle,
            got=f"exit status {done.returncode}, with the message above",
            action=f"see {' '.join(command[1:])}",
        )
    return rows
