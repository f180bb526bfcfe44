"""What a station reports on a stick: whose word it is, and what counts."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import private_key
from forge_station.bundles.jobs import JobRecord, Tally
from forge_station.rollout import stick
from forge_station.rollout.plan import Plan, read_plan
from forge_station.rollout.record import Folder, StationRecord
from forge_station.rollout.runner import UNSIGNED, Runner
from forge_station.rollout.ways import StickWay
from tests.rollout.plans import NEW, OLD, RELEASE, Clock, begun, plan_file


@pytest.mark.parametrize(
    "report",
    [
        {"version": 1}, {"jobId": "j", "version": 1, "state": 5}, {"jobId": "j", "version": "x"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "progress": "half"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "progress": float("nan")},
        {"jobId": "j", "version": float("inf"), "state": "TRIAL"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "trial": {"parts": "many"}},
        [], None, "x", {"schema": "conn/1.0", "state": "ONLINE", "reason": "started"},
    ],
)  # fmt: skip
def test_a_report_that_is_none_is_not_taken_from_a_stick(tmp_path: Path, report: object) -> None:
    good = {"jobId": "good", "state": "SHADOW", "version": 3}
    for name, content in (("good", json.dumps(good)), ("j", json.dumps(report)), ("k", "[" * 9999)):
        place = stick.place_of(tmp_path, name)
        place.mkdir()
        (place / stick.REPORT).write_text(content)
    digest = hashlib.sha256(json.dumps(good).encode()).hexdigest()
    wanted = stick.Report(good, "it is not signed", digest=digest)
    assert stick.read_reports(tmp_path, None) == {"good": wanted}


def signed_report(folder: Path, key: private_key.PrivateKey | None, **changes: Any) -> JobRecord:
    """What a station leaves on its stick."""
    job = JobRecord("t.s1", "file:///b.fsb", 1e9, state="SUCCEEDED", version=9, sha256=NEW)
    job = replace(job, **changes)
    place = stick.place_of(folder, job.id)
    place.mkdir(exist_ok=True)
    stick.write_report(place, job, key)
    return job


def forge(folder: Path, **changes: Any) -> None:
    path = stick.place_of(folder, "t.s1") / stick.REPORT
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def digest_on(folder: Path) -> str:
    body = (stick.place_of(folder, "t.s1") / stick.REPORT).read_bytes()
    return hashlib.sha256(body).hexdigest()


KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = private_key.public_half(KEY)


def alone(tmp_path: Path) -> tuple[Folder, Plan, StickWay]:
    """A rollout begun to s1 alone, whose stick is the folder m and whose key is KEY."""
    (tmp_path / "m").mkdir()
    stations = [{"name": "s1", "stick": "m", "key": base64.b64encode(PUBLIC.raw).decode()}]
    plan = plan_file(tmp_path, stations=stations, groups=[{"name": "all", "share": 1}], gates={})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    found = read_plan(plan)
    way = StickWay(tmp_path / "m", found.bundle_of(found.stations[0]), found.stations[0].key)
    return folder, found, way


def test_a_signed_report_is_the_word_of_its_station(tmp_path: Path) -> None:
    job = signed_report(tmp_path, KEY, tally=Tally(3), before="b")
    found = stick.read_reports(tmp_path, PUBLIC)["t.s1"]
    assert (found.doubt, found.forged) == ("", False)
    assert found.message == {**job.message(), "sha256": NEW}


@pytest.mark.parametrize(
    ("changes", "doubt", "forged"),
    [
        ({"state": "FAILED"}, "altered after it was signed", True),
        ({"trial": {"parts": 9, "fail": 0, "unsure": 0, "slow": 0}}, "altered", True),
        ({"sha256": OLD}, "altered", True),
        ({"more": 1}, "altered", True),
        ({"sig": {"keyId": PUBLIC.id, "alg": "ed25519", "value": "AA=="}}, "altered", True),
        ({"sig": {"keyId": "0" * 16, "value": ""}}, "signed with the key 0000", True),
        ({"sig": {}}, "signed with the key None", True),
        ({"sig": None}, "not signed", False),
    ],
)
def test_a_report_that_was_altered_is_not_its_word(
    tmp_path: Path, changes: dict[str, Any], doubt: str, forged: bool
) -> None:
    signed_report(tmp_path, KEY)
    forge(tmp_path, **changes)
    found = stick.read_reports(tmp_path, PUBLIC)["t.s1"]
    assert doubt in found.doubt and found.forged == forged


@pytest.mark.parametrize("sig", [5, "x", [], {"keyId": PUBLIC.id, "value": "A"}])
def test_what_is_no_signature_is_passed_over(tmp_path: Path, sig: object) -> None:
    signed_report(tmp_path, KEY)
    forge(tmp_path, sig=sig)
    found = stick.read_reports(tmp_path, PUBLIC)
    assert not found or found["t.s1"].forged


def test_a_report_beside_that_of_its_deployment_replaces_nothing(tmp_path: Path) -> None:
    job = signed_report(tmp_path, KEY)
    for name in ("a", "z"):
        place = stick.place_of(tmp_path, name)
        place.mkdir()
        stick.write_report(place, replace(job, state="FAILED"))
    assert stick.read_reports(tmp_path, PUBLIC)["t.s1"].message["state"] == "SUCCEEDED"


@pytest.mark.parametrize("begun", [False, True])
def test_no_order_is_laid_beside_that_of_another_rollout_that_is_not_over(
    tmp_path: Path, begun: bool
) -> None:
    """`begun`: the process was killed while it wrote its own."""
    (bundle := tmp_path / "b.fsb").write_bytes(b"x")
    way, other = StickWay(tmp_path, bundle, PUBLIC), StationRecord("s1", "all", "t.s1", RELEASE)
    assert way.deploy(other, "", False).taken
    own = replace(other, job="u.s1")
    if begun:
        stick.place_of(tmp_path, own.job).mkdir()
    answer = way.deploy(own, "", False)
    assert (answer.code, answer.later) == ("NOT_ALONE", True)
    assert "got one of rollout t" in answer.detail
    signed_report(tmp_path, OTHER, state="ROLLED_BACK")
    assert way.deploy(own, "", False).later, "a forged end is none"
    signed_report(tmp_path, KEY, state="ROLLED_BACK")
    assert way.deploy(replace(own, name="s2", job="u.s2"), "", False).taken, "another station"
    assert way.deploy(own, "", False).taken


def test_a_key_that_the_plan_does_not_name_proves_nothing(tmp_path: Path) -> None:
    signed_report(tmp_path, KEY)
    found = stick.read_reports(tmp_path, None)["t.s1"]
    assert "the plan names none" in found.doubt and not found.forged


@pytest.mark.parametrize(
    ("signer", "named", "changes", "counts"),
    [
        (KEY, False, {}, True),
        (None, False, {}, False),
        (None, True, {}, True),
        (OTHER, True, {}, False),
        (KEY, True, {"sha256": OLD}, False),
        (None, True, {"sha256": OLD}, False),
    ],
)
def test_only_a_report_that_counts_ends_the_rollout(
    tmp_path: Path, signer: Any, named: bool, changes: dict[str, Any], counts: bool
) -> None:
    """`named`: a person asked for the report of s1 though it is not signed."""
    folder, found, way = alone(tmp_path)
    runner = Runner(folder, found, {"s1": way}, lambda name: "", clock=Clock())
    runner.step()
    signed_report(tmp_path / "m", signer, **changes)
    if named:
        folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest_on(tmp_path / "m")})
    for _ in range(3):
        runner.step()
    item = runner.record.station("s1")
    assert (runner.record.phase == "SUCCEEDED") == counts == (item.state == "SUCCEEDED")
    assert item.unsigned == (counts and signer is None)
    assert counts or "its report does not count" in item.detail


def test_who_asks_for_an_unsigned_report_gets_that_one_and_none_later(tmp_path: Path) -> None:
    """And what counted still does, in another process too."""
    folder, found, way = alone(tmp_path)
    news: list[str] = []

    def resumed() -> StationRecord:
        runner = Runner(
            folder, found, {"s1": way}, lambda name: "",
            told=lambda text, name: news.append(text), clock=Clock(),
        )  # fmt: skip
        for _ in range(3):
            runner.step()
        return runner.record.station("s1")

    resumed()
    signed_report(tmp_path / "m", None, state="SHADOW", version=5)
    digest = digest_on(tmp_path / "m")
    folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest})
    assert resumed().state == "SHADOW" and folder.asked(UNSIGNED + "s1") is None
    assert news[-1] == f"SHADOW  (report {digest[:16]}... counts unsigned: me asked)"
    assert resumed().state == "SHADOW" and "counts unsigned" in news[-1], "no news"
    signed_report(tmp_path / "m", OTHER)
    assert "signed with the key" in resumed().detail
    forge(tmp_path / "m", sig=None)
    for _ in range(2):
        item = resumed()
        assert (item.step, item.state) == ("UNDER_WAY", "SHADOW")
        assert news[-1].startswith("its report does not count: it is not signed"), "each time"
        news.clear()
    folder.ask(UNSIGNED + "s1", {"by": "me"})
    assert resumed().state == "SHADOW", "as an earlier version left it"
    folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest_on(tmp_path / "m")})
    assert resumed().step == "DONE"
