"""The queue: what is drawn, who is asked what, what is blind, and what a crash leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import timedelta

import cv2
import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra hmi is not installed")
pytest.importorskip("numba", reason="parts come from the simulator, extra demo")

from forge_station.assurance import audit, audit_command
from forge_station.contract.label import settle
from forge_station.contract.views import NANO_LAYOUT
from forge_station.evidence.retention import drawn
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.sheet import surface_picture
from forge_station.hmi.review import log as module
from forge_station.hmi.review import pictures
from forge_station.hmi.review.labels import Answer, Painted
from forge_station.hmi.review.log import Log, ReviewError
from forge_station.hmi.review.queue import LABELS, QUEUE, Look, Queue
from forge_station.hmi.review.settings import ReviewSettings
from tests.assurance.test_audit import verdict
from tests.hmi.review_rig import Bench, row
from tests.hmi.stage import REPOSITORY
from tests.station.test_evidence import block

KEY = "0123456789abcdef"


def key(number: int) -> str:
    return f"{number:016x}"


def say(bench: Bench, who: str, said: str, number: int = 0, *, cells: bool = False) -> Look:
    """Take the next look of a person and answer it."""
    look = bench.queue.next(who, "operator")
    assert look is not None
    number = number or 1 + len(bench.queue.labels())
    bench.queue.answer(look, Answer(said, key(number), ms=2000), {"A.top": "d"}, cells)  # type: ignore[arg-type]
    return look


# ---------------------------------------------------------------- what is drawn


def test_pass_parts_are_drawn_with_the_stored_chance_and_everything_stopped_is(tmp_path):
    rows = [row(n, "PASS", share=0.10) for n in range(20_000)]
    rows += [row(20_000 + n, outcome) for n, outcome in enumerate(["FAIL", "UNSURE", "ERROR"])]
    bench = Bench(tmp_path, *rows, audit_share=0.02, pass_share=0.10)
    bench.queue.refresh()
    found = Counter(
        (item.origin, item.outcome, item.chance) for item in bench.queue.draws().values()
    )
    assert found.pop(("harvested", "FAIL", 1.0)) == found.pop(("harvested", "UNSURE", 1.0)) == 1
    ((kind, count),) = found.items()
    assert kind == ("audit", "PASS", 0.02)
    assert 400 - 80 < count < 400 + 80, "four standard deviations"
    kept = {r.result_id for r in rows if r.audit}
    assert {
        item.result_id for item in bench.queue.draws().values() if item.outcome == "PASS"
    } < kept


def test_every_draw_can_be_made_again_from_the_seed(tmp_path):
    bench = Bench(tmp_path / "a", *(row(n, "PASS") for n in range(500)), audit_share=0.2)
    bench.queue.refresh()
    first = {
        json.loads(line)["event"] for line in (tmp_path / "a" / QUEUE).read_text().splitlines()
    }
    assert first == {"seed", "draw"}
    seed = (tmp_path / "a" / QUEUE).read_text().splitlines()[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / QUEUE).write_text(f"{seed}\n")
    again = Bench(tmp_path / "b", *bench.rows, audit_share=0.2)
    again.queue.refresh()
    assert again.queue.draws() == bench.queue.draws() and 50 < len(bench.queue.draws()) < 150


def test_without_a_share_all_that_is_kept_for_audits_is_audited(tmp_path):
    rows = [row(n, "PASS", share=0.3) for n in range(100)]
    bench = Bench(tmp_path, *rows, audit_share=None, pass_share=0.3)
    assert bench.queue.refresh() == sum(part.audit for part in rows) > 0
    assert {item.chance for item in bench.queue.draws().values()} == {0.3}


def test_more_audits_than_evidence_is_kept_of_is_a_fault_of_the_settings(tmp_path):
    with pytest.raises(ReviewError, match=r"at most evidence.pass_share, 0.01"):
        Bench(tmp_path, audit_share=0.02, pass_share=0.01)


def test_about_two_of_five_looks_are_at_a_defect_and_one_of_ten_at_gold(tmp_path):
    """FAIL is right in 70 %, PASS in 99 %; there are three times as many PASS as FAIL."""
    truth = {}
    rows = [row(n, "FAIL" if n < 300 else "PASS") for n in range(1200)]
    for number, part in enumerate(rows):
        bad = number % 10 < 7 if part.outcome == "FAIL" else number % 100 == 0
        truth[part.result_id] = "NG" if bad else "OK"
    known = [row(5000 + n, "PASS", serial=f"M-{n}") for n in range(120)]
    masters = {f"M-{n}": "NG" if n % 2 else "OK" for n in range(120)}
    truth |= {part.result_id: masters[part.serial] for part in known}
    bench = Bench(tmp_path, *rows, *known, gold_share=0.10, masters=masters)
    looks = []
    for number in range(1, 301):
        look = bench.queue.next("anna", "operator")
        assert look is not None
        said = truth[look.result_id]
        bench.queue.answer(look, Answer(said, key(number), ms=2000), {}, False)  # type: ignore[arg-type]
        looks.append(look)
    bad = sum(truth[look.result_id] == "NG" for look in looks) / len(looks)
    gold = sum(look.kind == "gold" for look in looks) / len(looks)
    assert 0.30 < bad < 0.50 and 0.05 < gold < 0.16
    assert len({look.id for look in looks}) == 300, "each look has an id of its own"
    known_ids = {part.result_id for part in known}
    assert all((look.result_id in known_ids) == (look.kind == "gold") for look in looks)


def test_masters_come_as_gold_only_and_an_error_never(tmp_path):
    bench = Bench(tmp_path, row(1, "FAIL", "M-1"), row(2, "ERROR"), masters={"M-1": "NG"})
    assert bench.queue.next("anna", "operator") is None, "gold alone would be known for gold"
    assert bench.queue.draws() == {} and len(bench.queue.golden()) == 1


def test_the_truth_of_a_challenge_part_is_a_label_without_anybody_asked(tmp_path):
    bench = Bench(tmp_path, row(1, "PASS", "C-1"), row(2, "FAIL"), challenge={"C-1": "NG"})
    assert bench.queue.refresh() == 2
    (label,) = bench.queue.labels()
    assert (label.label, label.more["origin"], label.adjudicates) == ("NG", "challenge", True)
    bench.again().refresh()
    assert len(bench.queue.labels()) == 1 and bench.queue.waiting("anna") == 1
    judged = [replace(verdict(1, audit.Outcome.PASS), result_id=label.result_id)]
    (ledger,) = audit.ledgers(judged, bench.queue.labels())
    assert ledger.escape["challenge"].count == 1, "the station passed a part with a known fault"


def test_a_part_rests_before_it_is_shown(tmp_path):
    fresh = replace(row(1), time="2026-11-30T11:55:00.000Z")
    bench = Bench(tmp_path, fresh)
    assert bench.queue.next("anna", "operator") is None
    bench.now += timedelta(minutes=11)
    assert bench.queue.next("anna", "operator") is not None


def test_nobody_is_asked_of_the_part_that_the_live_screen_shows(tmp_path):
    """When the line stands still its last verdict stays there, however long the part has rested."""
    bench = Bench(tmp_path, row(1), row(2))
    shown = [row(1).result_id]
    bench.queue.close()
    queue = Queue(
        bench.folder, bench, bench.settings, now=lambda: bench.now, on_screen=lambda: shown[0]
    )
    assert queue.refresh() == 2 and queue.waiting("anna") == 1
    look = queue.next("anna", "operator")
    assert look is not None and look.result_id == row(2).result_id
    queue.answer(look, Answer("OK", KEY), {}, False)
    assert queue.next("anna", "operator") is None
    shown[0] = row(3).result_id
    look = queue.next("anna", "operator")
    assert look is not None and look.result_id == row(1).result_id
    queue.close()


def test_parts_that_are_old_or_gone_leave_the_queue(tmp_path):
    bench = Bench(tmp_path, row(1), row(2), row(3), max_age_days=1.0)
    bench.queue.refresh()
    first = bench.queue.next("anna", "operator")
    assert first is not None
    bench.rows = [part for part in bench.rows if part.result_id == row(3).result_id]
    left = {bench.queue.next(who, "operator") for who in ("anna", "ben")}
    assert {look.result_id for look in left if look is not None} == {row(3).result_id}
    bench.now += timedelta(days=2)
    assert bench.again().next("chen", "operator") is None and bench.queue.waiting("chen") == 0


def test_walls_with_fewer_points_than_the_top_look_sound():
    """A block scanned from above: camera pixels of 0.06 mm on top, 0.12 mm apart on its walls."""
    rng = np.random.default_rng(1)
    top = np.stack(np.meshgrid(np.arange(-10, 10, 0.06), np.arange(-10, 10, 0.06)), -1)
    along, up = np.meshgrid(np.arange(-10, 10, 0.12), np.arange(0, 10, 0.12))
    side = np.full(along.size, 10.0)
    walls = [np.stack([along.ravel(), s * side, up.ravel()], -1) for s in (-1, 1)]
    walls += [np.stack([s * side, along.ravel(), up.ravel()], -1) for s in (-1, 1)]
    flat = np.column_stack([top.reshape(-1, 2), np.full(top.size // 2, 10.0)])
    points = np.concatenate([flat, *walls])
    points = (points + rng.normal(0, 0.02, points.shape)).astype(np.float32)
    block = PartCloud(
        points, np.eye(4), np.zeros((4, 2), np.float32), False, camera_pixel_mm=0.06, poses=4
    )
    (shown,) = pictures.drawn([block])
    for view in ("front", "side"):
        image = cv2.imdecode(np.frombuffer(shown.views[view], np.uint8), cv2.IMREAD_GRAYSCALE)
        rows, columns = np.nonzero(image)
        wall = image[rows.min() + 20 : rows.max() - 20, columns.min() + 20 : columns.max() - 20]
        assert np.mean(wall < 180) < 0.01, view  # neither holes nor pits: sound is about 210


def test_pictures_have_one_size_and_the_window_of_the_surface_check():
    """Whatever the verdict marked: the window follows from the points, as the model's cells do."""
    small, large = block(20.0), block(30.0)
    found = pictures.drawn([small, large])
    for part, shown in zip((small, large), found, strict=True):
        model, _ = surface_picture(part.points, NANO_LAYOUT)
        assert shown.side_mm == pytest.approx(model.mm_per_px * NANO_LAYOUT.panel)
    together = pictures.drawn([small, large], together=True)
    assert {shown.side_mm for shown in together} == {found[1].side_mm}
    for shown in (*found, *together):
        for png in shown.views.values():
            image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED)
            assert image.shape == (pictures.SIDE_PX, pictures.SIDE_PX)
            assert image[:4].max() == 0 and image[200:280, 200:280].max() > 40
    again = pictures.digests(pictures.drawn([small, large]))
    assert again == pictures.digests(found) and len(set(again)) == 6


# ---------------------------------------------------------------- who is asked


def test_nobody_gets_a_part_twice_and_second_looks_go_to_somebody_else(tmp_path):
    bench = Bench(tmp_path, *(row(n) for n in range(200)), second_share=0.15)
    bench.queue.refresh()
    people = ["anna", "ben", "chen"]
    turn = 0
    while any(bench.queue.waiting(who) for who in people):
        who = people[turn % 3]
        turn += 1
        if bench.queue.waiting(who):
            say(bench, who, "OK")
    by_part = defaultdict(list)
    for label in bench.queue.labels():
        by_part[label.result_id].append(label)
    assert len(by_part) == 200
    for result_id, own in by_part.items():
        drawn_twice = bench.queue.draws()[result_id].second
        assert len({label.reviewer for label in own}) == len(own) == (2 if drawn_twice else 1)
        assert [label.more["second"] for label in own] == [False, True][: len(own)]
    twice = sum(len(own) == 2 for own in by_part.values())
    assert 12 <= twice <= 50, "15 % of 200, four standard deviations"


def test_a_part_that_somebody_looks_at_is_not_given_to_another_before_ten_minutes(tmp_path):
    bench = Bench(tmp_path, row(1))
    first = bench.queue.next("anna", "operator")
    assert first is not None and bench.queue.next("anna", "operator") == first, "a reload"
    assert bench.queue.next("ben", "operator") is None
    bench.now += timedelta(minutes=11)
    taken = bench.queue.next("ben", "operator")
    assert taken is not None and taken.result_id == first.result_id and taken.id != first.id
    with pytest.raises(ReviewError, match="no such look"):
        bench.queue.look(first.id, "ben")


def test_who_saw_the_verdict_in_the_history_is_not_asked(tmp_path):
    bench = Bench(tmp_path, row(1), row(2))
    look = bench.queue.next("anna", "operator")
    assert look is not None
    for number in (1, 2):
        bench.queue.seen("anna", row(number).result_id)
    assert bench.again().next("anna", "operator") is None
    late = bench.queue.answer(look, Answer("OK", KEY), {}, False)
    assert not late.blind, "asked blind, but looked it up before the answer"
    assert bench.queue.next("ben", "operator") is not None


@pytest.mark.parametrize("words", [("OK", "NG"), ("OK", "cannot_tell"), ("cannot_tell",)])
def test_who_disagrees_or_cannot_tell_sends_the_part_to_a_lead(tmp_path, words):
    bench = Bench(tmp_path, row(1), second_share=1.0)
    for who, said in zip(("anna", "lea"), words, strict=False):
        say(bench, who, said)
    assert bench.queue.next("chen", "operator") is None
    if len(words) == 2:
        assert bench.queue.next_dispute("lea", "lead") is None, "she has judged it herself"
    look = bench.queue.next_dispute("kim", "lead")
    assert look is not None
    bench.queue.answer(look, Answer("NG", key(9)), {}, True)
    assert bench.queue.next_dispute("lou", "lead") is None
    ((label, weight),), _ = settle(bench.queue.labels())
    assert (label.label, label.reviewer, weight) == ("NG", "kim", 0.98)


def test_a_lead_who_saw_the_verdict_adjudicates_nothing(tmp_path):
    bench = Bench(tmp_path, row(1))
    say(bench, "anna", "cannot_tell")
    look = bench.queue.next_dispute("lea", "lead")
    assert look is not None
    bench.queue.seen("lea", look.result_id)
    label = bench.queue.answer(look, Answer("OK", key(9)), {}, False)
    assert not label.blind and not label.adjudicates
    assert settle(bench.queue.labels())[0] == []
    assert bench.queue.next_dispute("kim", "lead") is not None


# ---------------------------------------------------------------- what is blind


def test_nothing_is_told_before_the_answer_and_what_is_said_after_is_informed(tmp_path):
    bench = Bench(tmp_path, row(1))
    look = bench.queue.next("anna", "operator")
    assert look is not None
    with pytest.raises(ReviewError, match="shown after the answer"):
        bench.queue.reveal(look)
    with pytest.raises(ReviewError, match="nothing was shown yet"):
        bench.queue.change(look, Answer("NG", KEY), {})
    bench.queue.answer(look, Answer("OK", key(1)), {}, False)
    bench.queue.reveal(look)
    bench.again().change(look, Answer("NG", key(2)), {})
    first, second = bench.queue.labels()
    assert (first.label, first.blind) == ("OK", True)
    assert (second.label, second.blind) == ("NG", False)
    assert bench.queue.next_dispute("lea", "lead") is not None, "taken back: the lead decides"


def test_cells_come_after_the_saved_ng_and_are_blind_until_the_reveal(tmp_path):
    bench = Bench(tmp_path, row(1), row(2))
    look = say(bench, "anna", "NG", cells=True)
    assert bench.queue.labels()[-1].more["cells"] == "asked", "saved before a cell is asked for"
    cells = {"top": ((4, 5), (4, 6)), "side": ()}
    bench.queue.paint(look, Painted(key(2), "dent", None, cells), {})
    ((label, _),), _ = settle(bench.queue.labels())
    assert label.more["cells"] == "given"
    assert (label.defect, label.cells, label.blind) == ("dent", {"top": ((4, 5), (4, 6))}, True)
    other = say(bench, "anna", "NG", 3, cells=True)
    bench.queue.reveal(other)
    bench.queue.paint(other, Painted(key(4), "cut"), {})
    late = bench.queue.labels()[-1]
    assert (late.blind, late.defect, late.more["cells"]) == (False, "cut", "skipped"), "class alone"


def test_skipped_cells_are_marked(tmp_path):
    bench = Bench(tmp_path, row(1))
    look = say(bench, "anna", "NG", cells=True)
    bench.queue.paint(look, Painted(key(2)), {})
    last = bench.queue.labels()[-1]
    assert last.more["cells"] == "skipped" and last.cells is None and last.label == "NG"


def test_cells_of_an_ok_are_refused(tmp_path):
    bench = Bench(tmp_path, row(1))
    look = say(bench, "anna", "OK")
    with pytest.raises(ReviewError, match="not NG"):
        bench.queue.paint(look, Painted(KEY, "dent"), {})


def test_gold_needs_a_truth_that_was_found_blind(tmp_path):
    bench = Bench(tmp_path, row(1), row(2), second_share=1.0, gold_share=1.0)
    look = say(bench, "anna", "NG")
    with pytest.raises(ReviewError, match="its truth is not known"):
        bench.queue.make_gold(look.result_id, "lea")
    while bench.queue.waiting("ben"):
        say(bench, "ben", "NG")
    gold = bench.queue.make_gold(look.result_id, "lea")
    assert gold.truth == "NG" and bench.kept[look.result_id] == "held"
    hidden = bench.queue.next("chen", "operator")
    assert hidden is not None and hidden.kind == "gold" and bench.queue.truth_of(hidden) is None
    label = bench.queue.answer(hidden, Answer("OK", key(77)), {}, True)
    assert bench.queue.truth_of(hidden) == "NG" and label.more["gold"] is True
    settled, counted = settle(bench.queue.labels())
    assert {item.label for item, _ in settled} == {"NG"} and counted["gold"] == 1


# ---------------------------------------------------------------- who reads it


def test_audit_and_training_read_the_file_as_it_is(tmp_path):
    loader = pytest.importorskip("training.data.loaders.evidence")
    outcomes = {"PASS": audit.Outcome.PASS, "FAIL": audit.Outcome.FAIL}
    rows = [row(n, "PASS" if n % 2 else "FAIL") for n in range(20)]
    bench = Bench(tmp_path, *rows)
    for _ in rows:
        say(bench, "anna", "OK", cells=True)
    labels = audit_command.read_labels(tmp_path / LABELS)
    verdicts = [
        replace(verdict(n, outcomes[part.outcome]), result_id=part.result_id)
        for n, part in enumerate(rows)
    ]
    (ledger,) = audit.ledgers(verdicts, labels)
    assert ledger.labelled == {"audit": 10, "harvested": 10} and not ledger.left_out
    assert ledger.outgoing is not None and (ledger.outgoing.count, ledger.outgoing.of) == (0, 10)
    for line in (tmp_path / LABELS).read_text().splitlines():
        label = loader.parse_label(line)
        assert label.blind and label.more["role"] == "operator" and label.more["sure"] is True
        assert label.more["ms"] == 2000 and label.more["viewDigest"] == {"A.top": "d"}
        assert label.more["bundleDigest"] == "b" * 64 and label.more["chance"] == 1.0


# ---------------------------------------------------------------- what a crash leaves

KILLED = """
import os, signal, sys
from pathlib import Path
from forge_station.hmi.review import log
stage, path = sys.argv[1:]
write = os.write
def die(): os.kill(os.getpid(), signal.SIGKILL)
def half(file, content):
    write(file, content[: len(content) // 2]); die()
def whole(file, content):
    write(file, content); die()
opened = log.Log(Path(path))
os.write = {"before": lambda *_: die(), "half": half, "written": whole}.get(stage, write)
opened.append({"result_id": "r", "label": "NG", "reviewer": "anna", "blind": True, "more": {}})
die()
"""


@pytest.mark.parametrize(
    ("stage", "rows"), [("before", 0), ("half", 0), ("written", 1), ("confirmed", 1)]
)
def test_a_kill_leaves_whole_rows_only_and_every_confirmed_one(tmp_path, stage, rows):
    path = tmp_path / LABELS
    path.write_text('{"n": 1}\n')
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "edge")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", KILLED, stage, str(path)], env=environment, check=False
    )
    assert done.returncode == -9
    found = Log(path)
    assert len(list(found.news())) == 1 + rows
    found.append({"n": 2})
    assert list(found.news()) == [{"n": 2}]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    found.close()


def test_an_answer_that_is_sent_again_counts_once_also_after_a_restart(tmp_path):
    bench = Bench(tmp_path, row(1), row(2))
    look = bench.queue.next("anna", "operator")
    assert look is not None
    given = Answer("NG", KEY, ms=1800)
    first = bench.queue.answer(look, given, {}, True)
    assert bench.queue.answer(look, given, {}, True) == first
    again = bench.again().answer(look, given, {}, True)
    assert again.more == first.more and len(bench.queue.labels()) == 1
    with pytest.raises(ReviewError, match="this part is answered"):
        bench.queue.answer(look, Answer("OK", key(3)), {}, True)
    other = bench.queue.next("anna", "operator")
    assert other is not None and other.result_id != look.result_id
    with pytest.raises(ReviewError, match="the key of another answer"):
        bench.queue.answer(other, given, {}, True)


def test_a_disk_that_is_full_saves_nothing_and_says_so(tmp_path, monkeypatch):
    bench = Bench(tmp_path, row(1))
    look = bench.queue.next("anna", "operator")
    assert look is not None
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(module.os, "write", lambda file, content: write(file, content[:20]))
        with pytest.raises(ReviewError, match="not saved"):
            bench.queue.answer(look, Answer("OK", KEY), {}, False)
    assert (tmp_path / LABELS).read_bytes() == b"" and bench.queue.labels() == []
    bench.queue.answer(look, Answer("OK", KEY), {}, False)
    assert len(bench.queue.labels()) == 1


def test_labels_that_others_add_are_read_and_a_line_that_is_none_is_named(tmp_path):
    bench = Bench(tmp_path, row(1))
    bench.queue.refresh()
    line = {"result_id": row(1).result_id, "label": "OK", "reviewer": "file", "blind": True}
    with (tmp_path / LABELS).open("a") as file:
        file.write(json.dumps(line))  # its editor left out the line break
    assert bench.queue.waiting("anna") == 1, "not a whole line yet"
    bench.again()
    assert bench.queue.waiting("anna") == 0 and len(bench.queue.labels()) == 1
    bench.queue.close()
    (tmp_path / LABELS).write_text('{"result_id": 1}\n')
    for _ in range(2):  # the first try leaves nothing behind that the second falls over
        with pytest.raises(ReviewError, match=r"not a row(?s:.)*line 1(?s:.)*a label"):
            bench.opened()
    (tmp_path / LABELS).write_text("")
    bench.opened().close()


def test_labels_behind_one_that_is_none_are_not_passed_over(tmp_path):
    """Else a part would count as judged by fewer people than it was, and nobody would know."""
    bench = Bench(tmp_path, row(1))
    bench.queue.refresh()
    good = {"result_id": row(1).result_id, "label": "OK", "reviewer": "file", "blind": True}
    with (tmp_path / LABELS).open("a") as file:
        file.write(f'{json.dumps(good)}\n{{"result_id": 1}}\n{json.dumps(good)}\n')
    for _ in range(2):
        with pytest.raises(ReviewError, match=r"line 2(?s:.)*a label"):
            bench.queue.labels()


@pytest.mark.parametrize(
    "row_",
    [
        {"event": "draw", "result_id": "r"}, {"event": "look", "id": 1}, {"event": "seed"},
        {"event": "gold", "result_id": "r", "product": "p", "truth": "maybe", "by": "x"},
        {"event": "look", "id": "l", "kind": "first", "result_id": "r", "reviewer": "anna",
         "role": "operator", "time": "yesterday"},
        {"event": "seen", "reviewer": "anna"}, {"event": "reveal"}, {"event": "gone"},
    ],
)  # fmt: skip
def test_a_damaged_row_of_the_queue_is_named(tmp_path, row_):
    bench = Bench(tmp_path, row(1))
    bench.queue.close()
    with (tmp_path / QUEUE).open("a") as file:
        file.write(json.dumps(row_) + "\n")
    for _ in range(2):
        with pytest.raises(ReviewError, match=rf"line 2(?s:.)*a whole {row_['event']}"):
            bench.opened()


def test_a_second_page_on_the_same_folder_is_refused(tmp_path):
    bench = Bench(tmp_path)
    with pytest.raises(ReviewError, match="another page uses this folder"):
        bench.opened()
    bench.again()


def test_the_share_of_evidence_is_drawn_apart_from_the_audit(tmp_path):
    """What is kept of PASS is drawn by the station's hash, the audit of it by the queue's seed."""
    rows = [row(n, "PASS", share=0.5) for n in range(400)]
    bench = Bench(tmp_path, *rows, audit_share=0.25, pass_share=0.5)
    bench.queue.refresh()
    taken = set(bench.queue.draws())
    kept = [r.result_id for r in rows if drawn(r.result_id, 0.5)]
    first = sum(r in taken for r in kept[: len(kept) // 2])
    assert taken <= set(kept) and 25 < first < 75, "half of what is kept, all over it"


def test_settings_out_of_bounds_are_named():
    with pytest.raises(ValueError, match="gold_share"):
        ReviewSettings(gold_share=1.5)
