"""Escapes and overkill over bundles and time: windows, what stands for a share, the page."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from forge_station.assurance import audit_command, ledger
from forge_station.assurance.error import AssuranceError
from forge_station.contract.label import Label
from forge_station.contract.verdict import (
    CheckResult,
    ModelUsed,
    Outcome,
    Reason,
    ScanSummary,
    Verdict,
    decide,
)

PASS, FAIL = Outcome.PASS, Outcome.FAIL


class Line:
    """Verdicts on days of a month, with a label each."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.labels: list[Label] = []

    def add(
        self, day: int, outcome: Outcome, said: str, count: int, model: str = "a",
        origin: str = "manual", line: str = "l1",
    ) -> None:  # fmt: skip
        reasons = () if outcome is PASS else (Reason("SURFACE_DENT", "a dent"),)
        for _ in range(count):
            name = f"{len(self.verdicts):05}"
            made = decide(
                required=("surface",),
                checks=[CheckResult("scan", PASS), CheckResult("surface", outcome, reasons)],
                scan=ScanSummary(points=1),
                result_id=f"r{name}",
                serial=f"s{name}",
                serial_source="scanner",
                product="NUT",
                line=line,
                model=ModelUsed(f"m-{model}", "1", 1, model * 64, "fp32", "CPU"),
                begin_time=f"2026-11-{day:02}T23:59:00.000Z",
            )
            self.verdicts.append(made)
            self.labels.append(Label(f"r{name}", said, "anna", True, more={"origin": origin}))  # type: ignore[arg-type]


@pytest.fixture
def line() -> Line:
    """Overkill of 30 % with bundle a; 10 % with bundle b, which came on the eighth."""
    found = Line()
    for day, model, failed in ((2, "a", 3), (3, "a", 3), (8, "a", 3), (8, "b", 1), (9, "b", 1)):
        found.add(day, FAIL, "OK", failed, model)
        found.add(day, PASS, "OK", 10 - failed, model)
    return found


def test_windows_and_bundles_are_never_pooled(line):
    found = ledger.entries(line.verdicts, line.labels, 7)
    # windows of seven days since 1970-01-01, a Thursday
    assert [(entry.begin, entry.ledger.bundle[:3]) for entry in found] == [
        ("2026-10-29", "m-a"), ("2026-11-05", "m-a"), ("2026-11-05", "m-b"),
    ]  # fmt: skip
    shares = [entry.share("overkill") for entry in found]
    assert [share[1] for share in shares if share] == [6 / 20, 3 / 10, 2 / 20]
    assert all(
        share and share[0] == "manual" and share[2] < share[1] < share[3] for share in shares
    )
    daily = ledger.entries(line.verdicts, line.labels, 1)
    assert [entry.begin[8:] for entry in daily] == ["02", "03", "08", "08", "09"]


def test_without_direct_labels_audit_and_review_stand_for_the_line():
    own = Line()
    own.add(3, PASS, "OK", 30, origin="audit")
    own.add(3, FAIL, "OK", 10, origin="harvested")
    own.add(3, FAIL, "NG", 10, origin="harvested")
    (entry,) = ledger.entries(own.verdicts, own.labels, 7)
    origin, share, low, high = entry.share("overkill") or pytest.fail("no share")
    assert origin == "combined" and share == pytest.approx(0.25) and low < 0.25 < high
    assert entry.share("unsure") is None
    assert ledger.facts(entry)["unsure"] is None


def test_a_label_nobody_gave_is_no_share(line):
    for entry in ledger.entries(line.verdicts, [], 7):
        assert [entry.share(name) for name in ledger.RATES] == [None, None, None]
    assert "no label tells" in ledger.page(ledger.entries(line.verdicts, [], 7), "here")


def test_a_verdict_without_a_time_is_named(line):
    broken = replace(line.verdicts[0], begin_time="yesterday", end_time="")
    with pytest.raises(AssuranceError, match="r00000"):
        ledger.entries([broken], [], 1)


def test_the_page_has_a_chart_a_rate_and_a_colour_a_bundle(line):
    line.add(9, FAIL, "OK", 2, "b", line="l<2>")
    page = ledger.page(ledger.entries(line.verdicts, line.labels, 1), "evidence")
    assert page.count("<svg") == 6 and "l&lt;2&gt;" in page and "l<2>" not in page
    chart = ledger.chart(ledger.entries(line.verdicts, line.labels, 1)[:5], "overkill")
    assert chart.count("<circle") == 5
    assert {"#0b3d91", "#b35900"} <= set(chart.replace('"', " ").split())


def test_the_command_writes_windows_and_report(line, tmp_path, capsys):
    folder = tmp_path / "evidence"
    folder.mkdir()
    for number, one in enumerate(line.verdicts):
        (folder / f"{number}.verdict.json").write_text(json.dumps(one.to_dict()))
    labels = tmp_path / "labels.jsonl"
    labels.write_text(
        "".join(
            json.dumps(
                {"result_id": one.result_id, "label": one.label, "reviewer": one.reviewer,
                 "blind": True, "more": dict(one.more)}
            ) + "\n"
            for one in line.labels
        )
    )  # fmt: skip
    parser = ArgumentParser()
    audit_command.add_arguments(parser)
    words = [str(folder), "--labels", str(labels), "--every", "7"]
    args = parser.parse_args([*words, "--report", str(tmp_path / "ledger.html")])
    audit_command.run(args)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [window["overkill"]["share"] for window in told["windows"]] == [0.3, 0.3, 0.1]
    assert "<svg" in (tmp_path / "ledger.html").read_text()
    with pytest.raises(AssuranceError, match="--every"):
        audit_command.run(parser.parse_args([*words[:3], "--report", "x.html"]))
    with pytest.raises(SystemExit):
        parser.parse_args([*words[:3], "--every", "0"])
