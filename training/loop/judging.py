"""The second half of the loop: a checkpoint becomes a bundle that was judged, sealed and tried."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_station import golden, private_key
from forge_station.bundles import archive
from forge_station.bundles.trust import Trust
from forge_station.checks import Thresholds
from forge_station.contract.certificate import CERTIFICATE_NAME
from forge_station.contract.manifest import Manifest
from forge_station.contract.verdict import Outcome
from forge_station.opening import open_inspector
from forge_station.vlm.bundle_files import read_manifest
from training.calibration import crossed, keys, parts, stored, suggest
from training.calibration.certify import Settings as Certifying
from training.calibration.error import CalibrationError
from training.calibration.limits import Target
from training.evaluation import by_station, promised
from training.evaluation.case_files import TASKS, Task, read_cases
from training.evaluation.promised import Promised
from training.evaluation.rows import Row, read_rows, write_row
from training.evaluation.run import one_by_one, run, run_digest
from training.loop import programs
from training.loop.error import LineError

if TYPE_CHECKING:
    from training.loop.steps import Loop, Notes

_LONG = ("cells", "cells_true", "cells_part", "marks", "probes", "exchanges")


def tasks(loop: Loop) -> tuple[Task, ...]:
    """The tasks of simulated parts that a line's products ask for."""
    kinds = {product.kind for product in loop.products}
    wanted: dict[Task, bool] = {
        "workpiece": "batch" in kinds,
        "assembly": "assembly" in kinds,
        "surface": bool(loop.inspected),
    }
    return tuple(task for task in TASKS if wanted[task]) or ("workpiece",)


def draft(loop: Loop) -> Notes:
    """The bundle with the recipe's limits, to choose others by."""
    manifest = _write(loop, loop.out / "draft", loop.recipe.thresholds)
    return {"checkpoint": loop.trained.name, "model_sha256": manifest.model_sha256}


def judge(loop: Loop) -> Notes:
    """Rows of all parts whose truth is known and that trained nothing."""
    found, left_out = _rows(loop, loop.out / "draft", "draft")
    keep(loop.out / "rows.jsonl", found)
    return {"rows": dict(Counter(row.provenance or "not told" for row in found)), **left_out}


def calibrate(loop: Loop) -> Notes:
    """Limits for the bundle."""
    own, folder = loop.recipe.calibrate, loop.out / "suggest"
    folder.mkdir(parents=True)
    before = read_manifest(loop.out / "draft").thresholds
    chosen: dict[str, float] = dict(before)
    notes: Notes = {"limits": "as the recipe has them"}
    if own.folds:
        try:
            crosswise = _crossed(loop, Thresholds.read(before))
        except CalibrationError as error:
            notes = {"limits": f"as the recipe has them, no others: {error}"}
        else:
            chosen |= crosswise.thresholds
            notes = crossed.facts(crosswise)
            drawn = suggest.picture(crosswise.curve, crosswise.chosen_on, crosswise.now)
            (folder / "suggest.png").write_bytes(drawn)
            _json(folder / "suggest.json", notes)
    elif own.suggest:
        rows = _carrying(read_rows(loop.out / "rows.jsonl", _LONG))
        escape = own.suggest_escape
        if own.before is not None:
            in_use, _ = _rows(loop, loop.path(own.before), "in-use")
            escape = suggest.escape_of(_carrying(in_use))
        try:
            done = suggest.suggest(
                rows, Thresholds.read(before), escape=escape, overkill=own.suggest_overkill
            )
        except CalibrationError as error:
            notes = {"limits": f"as the recipe has them, no others: {error}"}
        else:
            chosen |= done.thresholds
            told = {"now": suggest.facts(done.now), "predicted": suggest.facts(done.predicted)}
            drawn = suggest.picture(done.curve, done.chosen_on, done.now)
            (folder / "suggest.png").write_bytes(drawn)
            _json(folder / "suggest.json", told)
            notes = {"limits": done.thresholds, "predicted": told["predicted"]}
    _json(loop.out / "thresholds.json", chosen)
    return notes


def _crossed(loop: Loop, limits: Thresholds) -> crossed.Crossed:
    """Limits from what the folds' models say of parts that they did not train on."""
    from training.loop import folds

    rows = [
        row
        for number in loop.folds
        for row in read_rows(loop.out / folds.name(number) / folds.ROWS, _LONG)
    ]
    told = loop.told().told
    passed = {one.part for one in told if one.seen.verdict.outcome is Outcome.PASS}
    overkill = loop.recipe.calibrate.suggest_overkill
    return crossed.choose(_carrying(rows), limits, passed=passed, overkill=overkill)


def export(loop: Loop) -> Notes:
    """The bundle that is released."""
    limits = json.loads((loop.out / "thresholds.json").read_text())
    shutil.rmtree(loop.bundle, ignore_errors=True)
    manifest = _write(loop, loop.bundle, limits, golden_too=True)
    return {
        "bundle": f"{manifest.name} {manifest.version}, release {manifest.release_counter}",
        "sha256": manifest.sha256,
    }


def verify(loop: Loop) -> Notes:
    """Graphs against torch, verdicts against full precision. LineError over a limit."""
    folder = loop.out / "verify"
    folder.mkdir(parents=True)
    found = programs.run(
        "export.verify", "--checkpoint", loop.trained, "--bundle", loop.bundle,
        "--cases", loop.cases, "--work", folder, "--threads", loop.recipe.threads, "--repeats", 1,
    )  # fmt: skip
    drift = found["drift"]
    _json(folder / "drift.json", drift)
    flips = len(drift["flips"])
    return {"cases": drift["cases"], "flips": flips, "max_diff": found["max_diff"]}


def certify(loop: Loop) -> Notes:
    """The certificate, signed into the bundle; or why there is none and the bundle only advises.

    Limits that were suggested on the same parts do no harm: whatever they are, what passes scores
    below the order statistic that the claim rests on, or nothing of these parts does.
    """
    from training.calibrate import write_certified
    from training.calibration.certify import certify as made

    own, folder = loop.recipe.calibrate, loop.out / "calibration"
    folder.mkdir(parents=True)
    (loop.bundle / CERTIFICATE_NAME).unlink(missing_ok=True)
    if loop.key is None:
        return {"advisory": "no certificate: it has to be signed, and no --key was given"}
    manifest = read_manifest(loop.bundle)
    if manifest.model_sha256 == read_manifest(loop.out / "draft").model_sha256:
        rows = read_rows(loop.out / "rows.jsonl", _LONG)
    else:
        rows, _ = _rows(loop, loop.bundle, "released")
    sizes = Promised() if own.promised is None else promised.read(loop.path(own.promised))
    settings = Certifying(
        target=Target(own.escape, own.confidence, own.overkill, own.together),
        ledger=loop.out / "looks.jsonl" if own.ledger is None else loop.path(own.ledger),
        repeats="worst",
        promised=sizes.sizes,
        promised_unit=sizes.unit,
        label_protocol=own.label_protocol,
    )
    try:
        done = made(_carrying(rows), manifest, settings, datetime.now(timezone.utc))
    except CalibrationError as error:
        why = " ".join(str(error).split())
        _json(folder / "refused.json", {"refused": why})
        return {"advisory": f"no certificate: {why}"}
    write_certified(done, folder)
    signed = keys.signed(done.certificate, private_key.read(loop.key))
    keys.put(signed, loop.bundle)
    return {"certificate": done.certificate.text, "limit_pass": done.certificate.limit_pass}


def sign(loop: Loop) -> Notes:
    """Seal of the bundle, and the bundle as one file."""
    notes: Notes = {"seal": "none: no --key was given"}
    if loop.key is not None:
        programs.run("forge_station.cli", "bundle", "sign", loop.bundle, "--key", loop.key)
        notes = {"seal": private_key.public_half(private_key.read(loop.key)).id}
    file = loop.out / f"bundle-{loop.release}{archive.SUFFIX}"
    archive.pack(loop.bundle, file)
    return {**notes, "file": str(file), "bytes": file.stat().st_size}


def self_test(loop: Loop) -> Notes:
    """Take the file as a station does, with the trust of one, and judge its golden set."""
    file = loop.out / f"bundle-{loop.release}{archive.SUFFIX}"
    public = None if loop.key is None else private_key.public_half(private_key.read(loop.key))
    trust = Trust(unsigned=True) if public is None else Trust((public,))
    folder = loop.out / ".taken"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        archive.take(file, folder, trust)
        trusted = () if public is None else (public,)
        inspector = open_inspector(folder, trusted_keys=trusted, trust=trust)
        with inspector.model:
            found = golden.read(folder)
            if found is None:
                raise LineError("the bundle has no golden set", which=file)
            report = golden.run(inspector, *found, golden.Tolerance(p99_ms=float("inf")))
            refusal = inspector.permit.refusal
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if report.fault is not None:
        raise LineError("the self-test failed", which=file, got=report.fault)
    told = {
        "golden": report.cases,
        "grid_iou": report.grid_iou,
        "signed_by": "" if public is None else public.id,
        "permit": refusal or "certified",
    }
    _json(loop.out / "selftest.json", told)
    return told


# ---------------------------------------------------------------- shared


def _write(
    loop: Loop, out: Path, limits: Mapping[str, float], *, golden_too: bool = False
) -> Manifest:
    """`export.bundle` of the trained checkpoint."""
    own, references = loop.recipe, loop.shared / "references.npz"
    _json(loop.out / "limits.json", dict(limits))
    words: list[object] = [
        "--checkpoint", loop.trained, "--out", out, "--line", loop.line,
        "--name", own.name or loop.line.parent.name, "--version", own.version,
        "--release", loop.release, "--precision", own.precision,
        "--thresholds", loop.out / "limits.json", "--replace",
    ]  # fmt: skip
    if references.is_file():
        words += ["--references", references]
    if golden_too:
        words += ["--golden", loop.cases, "--golden-count", own.golden]
    programs.run("export.bundle", *words)
    return read_manifest(out)


def _rows(loop: Loop, bundle: Path, name: str) -> tuple[list[Row], Notes]:
    """Rows of the cases, and of the labelled parts that were held back."""
    found = _case_rows(loop, bundle, loop.out / f"rows-cases-{name}.jsonl")
    held = loop.held_back()
    left_out: Mapping[str, int] = {}
    if held:
        with stored.judge(bundle, loop.recipe.threads) as inspector:
            judged = stored.rows_of(held, inspector, quiet=loop.quiet)
        found, left_out = [*found, *judged.rows], judged.left_out
    return found, {"left_out": dict(left_out)} if left_out else {}


def _case_rows(loop: Loop, bundle: Path, out: Path) -> list[Row]:
    settings = by_station.Settings(loop.cases)
    inspector = by_station.opened(bundle, loop.recipe.threads, settings)
    with inspector.model:
        digest = run_digest({"bundle": inspector.model.manifest.sha256, "loop": 1})
        answer = one_by_one(partial(by_station.run_case, inspector, settings=settings))
        rows = run(read_cases(loop.cases), answer, out, digest, quiet=loop.quiet).rows
    return [dataclasses.replace(row, provenance=row.provenance or parts.SIMULATED) for row in rows]


def _carrying(rows: Sequence[Row]) -> list[Row]:
    """The rows that limits and claims rest on: real parts where there are any, else simulated ones.

    Of real parts those count that the station did not choose; where it chose all, they stay, and
    are refused by name.
    """
    real = [row for row in rows if row.provenance != parts.SIMULATED]
    own = [row for row in real if row.provenance not in parts.BARRED]
    return own or real or list(rows)


def keep(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, whole or not at all."""
    keys.write_whole(path, "".join(f"{write_row(row)}\n" for row in rows).encode())


def _json(path: Path, data: object) -> None:
    keys.write_whole(path, (json.dumps(data, indent=1) + "\n").encode())
