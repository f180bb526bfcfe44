"""The ledger of escapes and overkill, its alarm, and what it refuses to say."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_station.assurance import audit, audit_command, looks
from forge_station.assurance.agreement import Rate
from forge_station.assurance.error import AssuranceError
from forge_station.contract import binomial
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

PASS, FAIL, UNSURE, ERROR = Outcome.PASS, Outcome.FAIL, Outcome.UNSURE, Outcome.ERROR


def verdict(number: int, outcome: Outcome, serial: str = "", model: str = "a") -> Verdict:
    reasons = () if outcome is PASS else (Reason("SURFACE_DENT", "a dent"),)
    return decide(
        required=("surface",),
        checks=[CheckResult("scan", PASS), CheckResult("surface", outcome, reasons)],
        scan=ScanSummary(points=1),
        result_id=f"r{number:05}",
        serial=serial or f"s{number:05}",
        product="NUT",
        line="l1",
        model=ModelUsed("m", "1", 1, model * 64, "fp32", "CPU"),
        begin_time=f"2026-11-30T00:00:00.{number:06}Z",
    )


def label(number: int, said: str, origin: str | None = None, **more: Any) -> Label:
    kept = {} if origin is None else {"origin": origin}
    return Label(f"r{number:05}", said, "anna", True, more=kept, **more)  # type: ignore[arg-type]


class Set:
    """Verdicts and labels as they come."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.labels: list[Label] = []

    def add(
        self, count: int, outcome: Outcome, said: str | None, origin: str | None = None
    ) -> None:
        for _ in range(count):
            number = len(self.verdicts)
            self.verdicts.append(verdict(number, outcome))
            if said is not None:
                self.labels.append(label(number, said, origin))

    @property
    def ledger(self) -> audit.Ledger:
        (found,) = audit.ledgers(self.verdicts, self.labels)
        return found


def test_every_rate_has_its_own_denominator():
    parts = Set()
    parts.add(2, PASS, "NG", "manual")
    parts.add(18, FAIL, "NG", "manual")
    parts.add(90, PASS, "OK", "manual")
    parts.add(4, FAIL, "OK", "manual")
    parts.add(6, UNSURE, "OK", "manual")
    parts.add(5, ERROR, "OK", "manual")
    found = parts.ledger
    assert found.escape == {"manual": Rate(2, 20)}
    assert found.overkill == {"manual": Rate(4, 100)}
    assert found.unsure == {"manual": Rate(6, 100)}
    assert found.false_calls == Rate(4, 22)
    assert found.left_out == {"ERROR": 5}
    assert found.seen["ERROR"] == 5 and not found.refused


def test_parts_that_the_station_stopped_say_nothing_of_escapes():
    parts = Set()
    parts.add(50, FAIL, "NG")
    parts.add(20, UNSURE, "OK")
    parts.add(400, PASS, None)
    found = parts.ledger
    assert found.labelled == {"harvested": 70}
    assert "chosen because the station stopped them" in found.refused["escape"]
    assert found.escape == {} and found.outgoing is None and found.line_escape is None
    assert found.false_calls == Rate(0, 50)


def test_returned_parts_alone_say_nothing_of_escapes_either():
    parts = Set()
    parts.add(3, PASS, "NG", "returns")
    assert "escaped by definition" in parts.ledger.refused["escape"]


def test_audit_and_review_together_bound_escape_and_overkill_of_the_line():
    """1000 parts: 10 of the passed are defective, 40 FAIL are right, 10 are not; all labelled."""
    parts = Set()
    parts.add(930, PASS, "OK", "audit")
    parts.add(10, PASS, "NG", "audit")
    parts.add(40, FAIL, "NG")
    parts.add(10, FAIL, "OK")
    parts.add(10, UNSURE, "OK")
    found = parts.ledger
    assert found.outgoing == Rate(10, 940)
    assert found.line_escape is not None and found.line_overkill is not None
    assert found.line_escape.share == pytest.approx(10 / 50)
    assert found.line_overkill.share == pytest.approx(10 / 950)
    assert found.line_escape.low < 0.2 < found.line_escape.high
    assert 0.0 < found.line_overkill.low < 10 / 950 < found.line_overkill.high < 0.03


def test_the_bounds_of_the_line_hold_in_19_of_20_lines():
    """Half of PASS, FAIL and UNSURE parts labelled; the truth is known from the simulation."""
    rng = np.random.default_rng(4)
    missed = 0
    for _ in range(40):
        seen = rng.multinomial(1000, [0.9, 0.07, 0.03])
        rates = (0.005, 0.8, 0.3)
        truth = 0.9 * 0.005 / (0.9 * 0.005 + 0.07 * 0.8 + 0.03 * 0.3)
        judged = [
            audit.Judged(str(i), outcome, bool(defective), "", i)
            for outcome, count, rate in zip((PASS, FAIL, UNSURE), seen, rates, strict=True)
            for i, defective in enumerate(rng.random(count // 2) < rate)
        ]
        counts = dict(zip(("PASS", "FAIL", "UNSURE"), seen.tolist(), strict=True))
        audited = [part for part in judged if part.outcome is PASS]
        reviewed = [part for part in judged if part.outcome is not PASS]
        spans = audit._line_spans(counts, audited, reviewed)
        assert spans is not None
        missed += not spans[0].low <= truth <= spans[0].high
    assert missed <= 2


def test_two_bundles_are_never_pooled():
    parts = Set()
    parts.add(10, PASS, "OK", "audit")
    parts.verdicts += [verdict(100 + i, FAIL, model="b") for i in range(3)]
    parts.labels += [label(100 + i, "NG") for i in range(3)]
    first, second = audit.ledgers(parts.verdicts, parts.labels)
    assert first.outgoing == Rate(0, 10) and not first.refused
    assert second.labelled == {"harvested": 3} and "escape" in second.refused


def test_a_part_counts_once_by_the_capture_that_speaks_against_the_station():
    verdicts = [verdict(1, FAIL, "x"), verdict(2, PASS, "x"), verdict(3, UNSURE, "x")]
    labels = [label(n, "NG", "challenge") for n in (1, 2, 3)]
    (found,) = audit.ledgers(verdicts, labels)
    assert found.escape == {"challenge": Rate(1, 1)}
    assert found.left_out == {"the same part again": 2}


def test_labels_that_do_not_count_are_counted():
    parts = Set()
    parts.add(3, PASS, None)
    informed = Label("r00000", "OK", "bert", False)
    against = [label(1, "OK", "audit"), Label("r00001", "NG", "bert", True)]
    parts.labels = [informed, *against, label(2, "cannot_tell"), label(77, "OK", "audit")]
    found = parts.ledger
    assert found.left_out == {"informed": 1, "disagree": 2, "cannot_tell": 1, "no verdict": 1}
    assert found.refused == {"escape": "no label counts, see what was left out"}


def test_a_pass_whose_origin_is_not_told_does_not_count():
    parts = Set()
    parts.add(4, PASS, "OK")
    assert parts.ledger.left_out == {"origin of a PASS not told": 4}
    (told,) = audit.ledgers(parts.verdicts, parts.labels, origin="audit")
    assert told.outgoing == Rate(0, 4)


def test_the_alarm_rarely_comes_without_cause_however_often_it_is_looked_at():
    """500 stations whose rate is the limit, looked at after each of 2000 labels."""
    rng = np.random.default_rng(9)
    raised = 0
    for _ in range(500):
        times = np.flatnonzero(rng.random(2000) < 0.01) + 1
        # between events the evidence falls while k / t is above the limit: only events can alarm
        raised += any(
            k / t > 0.01 and audit.log_evidence(k, int(t), 0.01) > np.log(20)
            for k, t in enumerate(times, 1)
        )
    assert raised / 500 <= 0.05


@pytest.mark.parametrize(("rate", "expected"), [(0.03, 284), (0.05, 89)])
def test_the_alarm_finds_a_raised_rate_in_time(rate, expected):
    rng = np.random.default_rng(10)
    found = []
    for _ in range(200):
        events = (rng.random(4000) < rate).tolist()
        k = 0
        for t, event in enumerate(events, 1):
            k += event
            if event and k / t > 0.01 and audit.log_evidence(k, t, 0.01) > np.log(20):
                break
        found.append(t)
    assert np.median(found) == pytest.approx(expected, rel=0.2)


def test_the_alarm_follows_the_order_of_the_labels_not_of_the_parts():
    """Ten defective parts labelled last: they come after 90 good ones, whatever their time."""
    parts = Set()
    parts.add(10, PASS, "NG", "audit")
    parts.add(90, PASS, "OK", "audit")
    parts.labels = parts.labels[10:] + parts.labels[:10]
    (alarm,) = parts.ledger.alarms
    assert alarm.raised_at is not None and alarm.raised_at > 90


def test_an_alarm_once_raised_stays():
    events = [True] * 4 + [False] * 2000
    found = audit.alarm("outgoing", events, 0.01, 0.05)
    assert found.raised_at is not None and found.raised_at <= 4 and found.parts == 2004
    assert audit.alarm("outgoing", [False] * 500, 0.01, 0.05).raised_at is None


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """299 challenge parts, all stopped, with their verdicts and labels on disk."""
    parts = Set()
    parts.add(299, FAIL, "NG", "challenge")
    write(tmp_path, parts)
    return tmp_path


def write(folder: Path, parts: Set) -> None:
    for item in parts.verdicts:
        path = folder / "evidence" / f"{item.serial}.verdict.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(item.to_dict()))
    lines = [
        {"result_id": own.result_id, "label": own.label, "reviewer": own.reviewer,
         "blind": own.blind, "more": dict(own.more)}
        for own in parts.labels
    ]  # fmt: skip
    (folder / "labels.jsonl").write_text("\n".join(json.dumps(line) for line in lines))


def run(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    parser = ArgumentParser()
    audit_command.add_arguments(parser)
    given = [str(folder / "evidence"), "--labels", str(folder / "labels.jsonl"), *more]
    code = audit_command.run(parser.parse_args(given))
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_candidate_that_looked_too_often_is_refused(files, capsys):
    """299 parts carry 5 % of risk; a ledger of looks gives the first look 6/pi^2 of it (348)."""
    ledger = files / "looks.jsonl"
    claim = ["--looks", str(ledger), "--claim"]
    code, told = run(files, capsys, *claim, "0.02")
    assert code == 0 and told["claim"]["proved"] and told["claim"]["look"] == 1
    assert run(files, capsys, *claim, "0.02")[1]["claim"]["look"] == 1, "the same look again"
    ids = looks.names(f"s{number:05}" for number in range(299))
    for look in (2, 3, 4, 5, 6):
        looks.append(ledger, looks.Look(look, f"k{look}", "t", f"candidate {look}", "c", ids[:5]))
    code, told = run(files, capsys, *claim, "0.0201")
    assert code == 2 and told["claim"]["look"] == 7 and not told["claim"]["proved"]
    needed = binomial.needed(0.0201, binomial.look_delta(0.05, 7))
    assert (
        needed > 299 and f"at look 7 of these parts: {needed} without" in told["claim"]["refused"]
    )
    assert len(looks.read(ledger)) == 6, "a look that cannot pass is not taken"


def test_a_claim_from_harvested_rejects_is_refused(tmp_path, capsys):
    parts = Set()
    parts.add(400, FAIL, "NG")
    write(tmp_path, parts)
    code, told = run(tmp_path, capsys, "--claim", "0.05", "--looks", str(tmp_path / "looks.jsonl"))
    assert code == 2
    assert "chosen because the station stopped them" in told["refused"]["claim"]
    assert not (tmp_path / "looks.jsonl").exists()


def test_an_alarm_is_the_exit_code(tmp_path, capsys):
    parts = Set()
    parts.add(30, PASS, "OK", "audit")
    parts.add(6, PASS, "NG", "audit")
    write(tmp_path, parts)
    code, told = run(tmp_path, capsys)
    assert code == 1
    (ledger,) = told["ledgers"]
    assert ledger["alarms"][0]["what"] == "outgoing"
    assert ledger["alarms"][0]["raised_at"] <= 36
    assert ledger["outgoing"]["count"] == 6


def test_the_certificate_of_another_bundle_is_refused(files, capsys):
    demo = Path("station_config/demo/bundle")
    code, told = run(files, capsys, "--bundle", str(demo))
    assert code == 2
    assert "judged by another bundle (aaaaaaaaaaaa..." in told["refused"]["certificate"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "labels.jsonl, line 1"),
        ('{"result_id": "r", "label": "GOOD", "reviewer": "a", "blind": true}', "OK, NG"),
        ('{"result_id": "r", "label": "OK", "reviewer": "a", "blind": true, "more": {"origin": 1}}',
         "unknown origin"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_label_is_named(tmp_path, line, expected):
    (tmp_path / "labels.jsonl").write_text(line)
    with pytest.raises(AssuranceError, match=expected):
        audit_command.read_labels(tmp_path / "labels.jsonl")


def test_a_line_of_labels_ends_at_its_line_feed_alone(tmp_path):
    line = '{"result_id": "a\u2028b", "label": "OK", "reviewer": "a\u0085b", "blind": true}\n'
    (tmp_path / "labels.jsonl").write_text(2 * line)
    found = audit_command.read_labels(tmp_path / "labels.jsonl")
    assert [label.result_id for label in found] == 2 * ["a\u2028b"]


def test_a_claim_needs_its_ledger(files, capsys):
    with pytest.raises(AssuranceError, match="--claim and --looks together"):
        run(files, capsys, "--claim", "0.01")
