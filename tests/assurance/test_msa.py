"""Study files and the command msa, from CSV to the report."""

from __future__ import annotations

import csv
import io
import json
import re
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_station.assurance import msa_command, study_files, svg
from forge_station.assurance.error import AssuranceError
from forge_station.contract.verdict import (
    CheckResult,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    Verdict,
    decide,
)
from tests.assurance.test_gauge_study import aiag


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    parser = ArgumentParser()
    msa_command.add_arguments(parser)
    args = parser.parse_args(list(words))
    code: int = args.run(args)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def aiag_file(folder: Path) -> Path:
    study = aiag()
    rows = [
        {"part": part, "appraiser": name, "trial": k + 1, "value": study.values[i, j, k]}
        for k in range(3)
        for i, part in enumerate(study.parts)
        for j, name in enumerate(study.appraisers)
    ]
    path = folder / "aiag.csv"
    path.write_text(study_files.to_csv(rows, study_files.GAUGE))
    return path


def test_the_aiags_example_from_csv_to_report(tmp_path, capsys):
    code, told = run(
        capsys, "gauge", str(aiag_file(tmp_path)), "--tolerance", "4", "--out", str(tmp_path / "r")
    )
    (found,) = told["features"]
    assert code == 1 and found["decision"] == "marginal"
    assert round(found["anova"]["percent_GRR"], 2) == 27.86 and found["anova"]["ndc"] == 4
    assert found["out_of_control"] == [["04", "B"]]
    page = Path(told["files"]["html"]).read_text()
    assert page.count("<svg") == 4 and "27.86" in page
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|<script", page)
    table = list(csv.DictReader(io.StringIO(Path(told["files"]["csv"]).read_text())))
    assert [row["method"] for row in table] == ["anova", "average_and_range"]


def attribute_file(folder: Path, station: str = "PASS") -> Path:
    """60 parts, half good; the station right but for one decision, anna always."""
    lines = ["part,appraiser,trial,decision,reference"]
    for number in range(60):
        good = number % 2 == 0
        for name in ("station", "anna"):
            for trial in (1, 2, 3):
                said = "OK" if good else "NG"
                if name == "station" and (number, trial) == (1, 2):
                    said = station
                lines.append(f"P{number:02},{name},{trial},{said},{'OK' if good else 'NG'}")
    path = folder / "study.csv"
    path.write_text("\n".join(lines))
    return path


def test_an_attribute_study_from_csv_to_report(tmp_path, capsys):
    study = attribute_file(tmp_path)
    code, told = run(capsys, "attribute", str(study), "--out", str(tmp_path / "r"))
    assert code == 0
    own = told["appraisers"]["station"]
    assert (own["effectiveness"]["count"], own["miss"]["count"], own["miss"]["of"]) == (59, 1, 90)
    assert own["decision"] == "acceptable" and told["appraisers"]["anna"]["miss"]["count"] == 0
    page = Path(told["files"]["html"]).read_text()
    assert page.count("<svg") == 5 and "does not show how many defects escape" in page
    table = list(csv.DictReader(io.StringIO(Path(told["files"]["csv"]).read_text())))
    assert {row["appraiser"] for row in table} == {"station", "anna"}


def test_unsure_of_a_bad_part_is_no_miss(tmp_path, capsys):
    _, told = run(capsys, "attribute", str(attribute_file(tmp_path, "UNSURE")))
    own = told["appraisers"]["station"]
    assert own["miss"]["count"] == 0 and own["effectiveness"]["count"] == 59
    assert own["effectiveness_routed"]["count"] == 60


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("P00,station,1,OK,OK", r"lines 2 and 362"),
        ("P00,station,4,MAYBE,OK", r"line 362: decision.*PASS \(OK\)"),
        ("P00,station,4,OK,NG", r"part P00.*two references|two references.*part P00"),
        ("P00,station,4,,OK", r"line 362.*got no decision"),
        ("P00,station,4,OK,OK", r"not complete"),
    ],
)
def test_a_line_at_fault_is_named(tmp_path, line, expected):
    path = attribute_file(tmp_path)
    path.write_text(path.read_text() + "\n" + line)
    with pytest.raises(AssuranceError, match=expected):
        study_files.attribute_study(path)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "part,appraiser,trial,value\n"])
def test_a_file_that_is_no_study_is_refused(tmp_path, content):
    path = tmp_path / "s.csv"
    path.write_text(content)
    with pytest.raises(AssuranceError, match="expected a first line part,appraiser,trial,value"):
        study_files.gauge_studies(path)


def test_a_value_that_is_no_number_is_named(tmp_path):
    path = aiag_file(tmp_path)
    path.write_text(path.read_text().replace("0.29", "abc", 1))
    with pytest.raises(AssuranceError, match="line 2: value"):
        study_files.gauge_studies(path)


def test_a_template_has_every_trial_once_in_random_order_and_is_not_written_over(tmp_path, capsys):
    out = tmp_path / "t.csv"
    words = ["template", "attribute", "--parts", "12", "--appraisers", "s,anna", "--out", str(out)]
    assert run(capsys, *words)[1]["lines"] == 12 * 2 * 3
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert set(Counter((r["part"], r["appraiser"], r["trial"]) for r in rows).values()) == {1}
    first = [row["part"] for row in rows[:12]]
    assert first != sorted(first) and sorted(first) == sorted({row["part"] for row in rows})
    with pytest.raises(AssuranceError, match="exists already"):
        run(capsys, *words)


def verdict(n: int, serial: str, outcome: Outcome, size: float = 10.0, parts: int = 1) -> Verdict:
    reasons = () if outcome is Outcome.PASS else (Reason("SURFACE_DENT", "a dent"),)
    read = [PartReading(mark, "hex_nut", "M8", 0.9, size_mm=(size, 2.0, 3.0)) for mark in "AB"]
    return decide(
        required=("surface",),
        checks=[CheckResult("scan", Outcome.PASS), CheckResult("surface", outcome, reasons)],
        scan=ScanSummary(points=1),
        result_id=f"r{n}",
        serial=serial,
        product="NUT",
        parts=tuple(read[:parts]),
        station="S2",
        begin_time=f"2026-11-30T00:00:{n:02}.000Z",
    )


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """Serials a and b fed four times, c once, and an ERROR; files in no order of time."""
    found = [verdict(n, "ab"[n % 2], Outcome.PASS, 10.0 + n) for n in range(8)]
    found += [verdict(20, "c", Outcome.PASS), verdict(21, "a", Outcome.ERROR)]
    for number, item in enumerate(reversed(found)):
        (tmp_path / f"{number}.verdict.json").write_text(json.dumps(item.to_dict()))
    return tmp_path


def test_the_stations_own_trials_are_collected(evidence, capsys):
    out = evidence / "own.csv"
    _, told = run(capsys, "collect", "attribute", "--evidence", str(evidence), "--out", str(out))
    assert told["lines"] == 8 and told["left_out"] == {"ERROR": 1, "fed once": 1}
    study = study_files.attribute_study(out)
    assert study.trials == 4 and study.decisions["S2"]["a"] == ("PASS",) * 4


def test_runs_are_shared_out_to_who_fed_the_parts(evidence, capsys):
    out = evidence / "own.csv"
    truth = evidence / "truth.csv"
    truth.write_text("part,feature,reference\na,length,13\nb,length,14\n")
    words = ["collect", "gauge", "--evidence", str(evidence), "--appraisers", "anna,bert"]
    run(capsys, *words, "--reference", str(truth), "--out", str(out))
    study = study_files.gauge_studies(out)["length"]
    assert study.appraisers == ("anna", "bert")
    assert study.values[0].tolist() == [[10.0, 12.0], [14.0, 16.0]]
    assert study.reference is not None and study.reference.tolist() == [13.0, 14.0]
    with pytest.raises(AssuranceError, match="multiple of 3 runs"):
        run(capsys, *words[:-1], "a,b,c", "--out", str(evidence / "x.csv"))


def test_sizes_of_trays_are_left_out():
    rows, left_out = study_files.collect(
        [verdict(n, "a", Outcome.PASS, parts=2) for n in range(2)], "gauge"
    )
    assert rows == [] and left_out == {"several parts or no size": 2}


@pytest.mark.parametrize(
    ("span", "expected"),
    [((0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]), ((-3, 7), [-2, 0, 2, 4, 6]), ((5, 5), [5])],
)
def test_ticks_are_round_values(span, expected):
    assert svg.ticks(*span) == pytest.approx(expected)
