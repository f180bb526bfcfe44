"""The history's answers: filters, pages, one part, marks; and that a look there ends blindness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra hmi is not installed")
pytest.importorskip("numba", reason="parts come from the simulator, extra demo")

from starlette.testclient import TestClient

from forge_station.config import EvidenceConfig
from forge_station.evidence.folder import Bundle, Folder
from forge_station.hmi import history
from forge_station.hmi.app import TOKEN, build
from forge_station.hmi.context import Context
from forge_station.hmi.users import Role
from tests.hmi.review_rig import store
from tests.hmi.stage import Stage, verdict

PIN, ORIGIN = "862042", "http://127.0.0.1"


class Panel:
    """A browser without a screen, logged in."""

    def __init__(self, client: TestClient, name: str) -> None:
        self.client = client
        given = client.post(
            "/api/session/login", json={"name": name, "pin": PIN}, headers={"origin": ORIGIN}
        )
        self.token = given.json()["token"]

    def get(self, path: str, **query: str) -> Any:
        found = self.client.get(path, params=query)
        assert found.status_code == 200, found.text
        return found.json()

    def post(self, path: str, **body: Any) -> Any:
        headers = {"origin": ORIGIN, TOKEN: self.token}
        return self.client.post(path, json=body, headers=headers)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path / "station", {"review": {"rest_minutes": 0}}) as found:
        yield found


@pytest.fixture
def panel(stage: Stage) -> Iterator[Panel]:
    context = Context.of(stage.config)
    context.users.add("adm", Role.ADMIN, PIN)
    context.users.add("anna", Role.OPERATOR, PIN)
    context.users.add("lea", Role.LEAD, PIN)
    yield Panel(TestClient(build(context), base_url=ORIGIN), "anna")
    context.review.close()


def fill(stage: Stage, count: int) -> None:
    """Parts of which only the verdict is kept: FAIL every fifth, all within one minute."""
    folder = stage.config.evidence.folder
    with Folder(folder, EvidenceConfig(folder, min_free_gb=0.0)) as kept:
        for number in range(count):
            time = f"2026-11-30T08:00:{number // 3:02d}.000Z"
            said = verdict("FAIL" if number % 5 == 0 else "PASS", number)
            kept.add(Bundle({**said, "begin_time": time, "end_time": time}, {}))


def serials(found: dict[str, Any]) -> list[str]:
    return [part["serial"] for part in found["parts"]]


def test_pages_follow_each_other_and_every_part_is_on_one(panel, stage):
    fill(stage, 2 * history.PAGE + 7)
    seen: list[str] = []
    after = ""
    for size in (history.PAGE, history.PAGE, 7):
        found = panel.get("/api/history/parts", after=after)
        assert len(found["parts"]) == size
        seen += serials(found)
        after = found["after"] or ""
    assert after == "" and len(set(seen)) == len(seen) == 2 * history.PAGE + 7


def test_filters_are_held_against_every_part(panel, stage):
    fill(stage, 60)
    fails = [f"4711-{n:04d}" for n in reversed(range(0, 60, 5))]
    asked = panel.get
    path = "/api/history/parts"
    assert sorted(serials(asked(path, outcome="FAIL"))) == sorted(fails)
    assert sorted(serials(asked(path, reason="SURFACE_DENT"))) == sorted(fails)
    assert serials(asked(path, reason="SURFACE_CUT")) == []
    assert serials(asked(path, serial="0042")) == ["4711-0042"]
    within = asked(path, since="2026-11-30T08:00:05", until="2026-11-30T08:00:07.000Z")
    assert sorted(serials(within)) == [f"4711-{n:04d}" for n in range(15, 21)]
    assert serials(asked(path, product="OTHER")) == []
    assert len(serials(asked(path, product="NUT-M8", outcome="FAIL,PASS"))) == history.PAGE
    choices = asked("/api/history/choices")
    assert choices["reasons"] == ["LOW_SURFACE_SCORE", "SURFACE_DENT"]
    refused = panel.client.get(path, params={"outcome": "GOOD"})
    assert refused.status_code == 409 and "no such outcome" in refused.text


def test_one_part_shows_views_readings_digests_and_the_cells_of_the_model(panel, stage):
    said = store(stage.config.evidence.folder, "FAIL", 1)
    part = panel.get(f"/api/history/part/{said['result_id']}")
    (only,) = part["parts"]
    assert only["grids"] == {"top": [[9, 6], [9, 7], [10, 5], [10, 6], [10, 7]]}
    assert part["verdict"]["reasons"][0]["code"] == "SURFACE_DENT"
    assert part["bundle"] == said["model"]["sha256"] and part["labels"] == []
    for url in only["views"].values():
        assert panel.client.get(url).content.startswith(b"\x89PNG")
    assert panel.client.get(f"{only['views']['top']}x").status_code == 404
    assert panel.client.get("/api/history/part/none").status_code == 404


def test_a_mark_is_set_audited_and_taken_away(panel, stage):
    said = store(stage.config.evidence.folder, "PASS", 1)
    path = f"/api/history/part/{said['result_id']}/mark"
    assert panel.post(path, mark="held").json()["mark"] == "held"
    assert len(list(stage.config.evidence.folder.glob("*.mark.json"))) == 1
    assert panel.post(path, mark="none").json()["mark"] == "none"
    assert not list(stage.config.evidence.folder.glob("*.mark.json"))
    refused = panel.post(path, mark="labelled")
    assert refused.status_code == 409 and "none, review, held" in refused.text
    lines = [line for line in Context.of(stage.config).audit.lines() if "mark" in line["action"]]
    assert [line["after"]["mark"] for line in lines] == ["held", "none"]
    assert lines[0]["who"] == "anna"


def test_who_looked_a_part_up_is_not_asked_to_judge_it_blind(panel, stage):
    said = [store(stage.config.evidence.folder, "FAIL", n) for n in range(2)]
    panel.get(f"/api/history/part/{said[0]['result_id']}")
    look = panel.post("/api/review/next").json()["look"]
    given = panel.post(f"/api/review/{look}/answer", label="OK", key="k" * 16, ms=1).json()
    assert given["reveal"]["result_id"] == said[1]["result_id"]
    assert panel.post("/api/review/next").json() == {"look": None}


def test_who_looked_at_a_picture_of_a_part_knows_it_too(panel, stage):
    """Else a picture of the history, held against that of the look, would give the verdict away."""
    said = store(stage.config.evidence.folder, "FAIL", 1)
    path = f"/api/history/part/{said['result_id']}/A/front"
    assert panel.client.get(path).status_code == 200
    assert panel.post("/api/review/next").json() == {"look": None}


@pytest.mark.parametrize("text", ["[" * 50_000, "5", "{", "\xff"])
def test_a_damaged_verdict_is_named(panel, stage, text):
    folder = stage.config.evidence.folder
    said = store(folder, "FAIL", 1)
    (path,) = folder.glob("*.verdict.json")
    path.write_text(text, encoding="latin-1")
    answer = panel.client.get(f"/api/history/part/{said['result_id']}")
    assert answer.status_code == 409 and "erdict" in answer.json()["text"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04junk", None])
def test_a_part_whose_points_are_damaged_stops_no_review(panel, stage, content):
    """It is passed over for good, and the next part is shown."""
    folder = stage.config.evidence.folder
    said = [store(folder, "FAIL", n) for n in range(3)]
    for path in sorted(folder.glob("*.case.npz"))[:2]:
        path.unlink() if content is None else path.write_bytes(content)
    look = panel.post("/api/review/next").json()["look"]
    given = panel.post(f"/api/review/{look}/answer", label="OK", key="k" * 16, ms=1).json()
    assert given["reveal"]["result_id"] in [item["result_id"] for item in said]
    assert panel.post("/api/review/next").json() == {"look": None}
    assert panel.get("/api/review/state")["waiting"] == 0


def test_what_people_said_is_for_the_lead_and_without_names(panel, stage):
    said = store(stage.config.evidence.folder, "FAIL", 1)
    look = panel.post("/api/review/next").json()["look"]
    panel.post(f"/api/review/{look}/answer", label="OK", key="k" * 16, ms=1)
    path = f"/api/history/part/{said['result_id']}"
    assert panel.get(path)["labels"] == []
    lead = Panel(panel.client, "lea")
    told = lead.client.get(path)
    assert [item["label"] for item in told.json()["labels"]] == ["OK"]
    assert "anna" not in told.text and told.json()["may_be_gold"] is False
