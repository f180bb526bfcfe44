"""What a station with a bundle's certificate would have called the rows of an evaluation.

The evaluation itself measures the checks alone; this holds their outcomes against the limit, so
that both stand in one report. It verifies no signature: whom to trust is the station's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_station.contract import certificate as contract_certificate
from forge_station.contract.certificate import CERTIFICATE_NAME, Certificate
from forge_station.contract.error import ContractError
from forge_station.permit import part_score
from forge_station.vlm.bundle_files import read_manifest
from training.evaluation.rows import Row


def outcome(row: Row, found: Certificate) -> str:
    """The row's outcome; of a PASS what the limit makes of it. Covers the check and workpieces."""
    if row.outcome != "PASS":
        return row.outcome
    covered = set(row.families) <= set(found.families.get(row.task, ())) and bool(row.families)
    score = part_score(row.log_odds, found.temperatures)
    return "PASS" if covered and score is not None and score < found.limit_pass else "UNSURE"


def figures(rows: Sequence[Row], bundle: Path) -> dict[str, Any] | None:
    """Per task: outcomes of good and of defective rows under the bundle's certificate.

    None without a certificate, and for one that is malformed or made for other model files: no
    station uses it.
    """
    try:
        content = (bundle / CERTIFICATE_NAME).read_bytes()
        found = contract_certificate.parse(content).certificate
    except (OSError, ContractError):
        return None
    if found.model_sha256 != read_manifest(bundle).model_sha256:
        return None
    tasks: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        tasks[task] = {
            word: dict(Counter(outcome(row, found) for row in own if row.expected == expected))
            for word, expected in (("good", "PASS"), ("defective", "FAIL"))
        }
    return {"claim": found.text, "limit_pass": found.limit_pass, "tasks": tasks}
