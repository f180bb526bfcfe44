"""The row of a case of which nothing is known yet but the truth. Opens no file, asks no model."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from forge_station.contract import record
from forge_station.contract.spec import Product
from forge_station.errors import InputError
from training.evaluation.case_files import BadCase, Case, write_line
from training.evaluation.rows import MarkRow, Row
from training.evaluation.truth import fault_of


def digest_of(case: Case | BadCase) -> str:
    """16 hex digits that change when anything of the case's line does."""
    text = case.message if isinstance(case, BadCase) else write_line(case)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def product_of(case: Case) -> Product:
    if case.product is None:
        raise InputError("the case has no product", which=case.id)
    return case.product


def blank_row(case: Case, setting: str = "") -> Row:
    """Truth without an answer; outcome ERROR. `setting`: what the run asks instead of the case."""
    truth, surface = case.truth, case.task == "surface"
    fault, alike = "", ""
    if case.product is not None and not surface and not case.product.photo:
        fault, alike = fault_of(
            case.product.parts, truth.readings, truth.answers, truth.missing, truth.violations
        )
    return Row(
        id=case.id,
        task=case.task,
        setting=setting or case.setting,
        outcome="ERROR",
        expected=truth.expected,
        source=case.input.source,
        parts_true=len(truth.readings) or None,
        # On a surface case the part number is given, so its reading is no result.
        marks=()
        if surface
        else tuple(MarkRow(mark, part) for mark, part in sorted(truth.readings.items())),
        answers_true=None if surface else truth.answers,
        missing_true=truth.missing if case.task == "assembly" else None,
        violations_true=truth.violations,
        defect_true=truth.defect,
        score_true=truth.score,
        fault=fault,
        lookalike=alike,
        subset=case.subset,
        families=_families(case),
        rules=_rules(case.product),
        part=case.part,
        provenance=case.provenance,
        defect_size_mm=truth.defect_size_mm,
        defect_size_px=truth.defect_size_px,
        defect_extent_mm=truth.defect_extent_mm,
        case=digest_of(case),
    )


def failed_row(case: Case, code: str, text: str, setting: str = "") -> Row:
    """The row of a case whose files, or whose model, gave no answer."""
    message = f"case {case.id}, input.{case.input.source}: {text}"
    return replace(blank_row(case, setting), reasons=(code,), error=message)


def bad_row(case: BadCase) -> Row:
    """The row of a line that is no case."""
    return Row(
        case.id,
        case.task,
        "",
        "ERROR",
        reasons=("INPUT_WRONG",),
        error=case.message,
        case=digest_of(case),
    )


def _families(case: Case) -> tuple[str, ...]:
    """Workpieces that are asked for; of a batch without parts those that lie on the tray."""
    asked = case.product.parts if case.product is not None else {}
    named = asked or case.truth.readings.values()
    return tuple(sorted({part.partition(" ")[0] for part in named}))


def _rules(product: Product | None) -> dict[str, float]:
    limits = record.write(product.rules) if product is not None else {}
    return {name: limit for name, limit in limits.items() if limit is not None}
