"""The review in a real browser: what goes over the wire before an answer, what an answer costs, and
that neither a lost reply nor a dead server loses one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra hmi is not installed")
pytest.importorskip("numba", reason="parts come from the simulator, extra demo")

from forge_station.hmi.review.queue import LABELS
from forge_station.hmi.settings import Panel
from forge_station.hmi.users import Role, Users
from tests.hmi.conftest import free_port, in_thread, served
from tests.hmi.review_rig import store
from tests.hmi.stage import PANELS, Stage
from tests.hmi.test_live import AXE, TAGS

PIN = "862042"
PX = (1280, 800)
HMI = {
    "panel": {"diag_in": PANELS[PX], "px": list(PX)},
    "review": {"rest_minutes": 0, "gold_share": 0.0, "second_share": 0.0},
}
PRIMARY_MM, APART_MM = 22.0, 13.0


class Desk:
    """Somebody at the review."""

    def __init__(self, stage: Stage, page: Any, url: str, name: str = "anna") -> None:
        self.stage, self.page, self.url = stage, page, url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.enter(name)

    def enter(self, name: str, screen: str = "review") -> None:
        self.page.goto(f"{self.url}?lang=en")
        status = self.page.evaluate(
            """([name, pin]) => fetch('/api/session/login', {method: 'POST',
               headers: {'content-type': 'application/json'},
               body: JSON.stringify({name, pin})}).then((answer) => answer.status)""",
            [name, PIN],
        )
        assert status == 200
        self.page.goto(f"{self.url}?lang=en#{screen}")
        self.page.reload()

    def ready(self) -> None:
        self.page.wait_for_selector(".answer:not([aria-disabled])", timeout=30_000)

    def press(self, which: str) -> None:
        self.page.click(which)

    @property
    def labels(self) -> list[dict[str, Any]]:
        path = self.stage.folder / "hmi" / "review" / LABELS
        return [json.loads(line) for line in path.read_text().splitlines()]

    def no_violations(self) -> None:
        self.page.evaluate(AXE.read_text() + "; 0")
        found = self.page.evaluate(
            "tags => axe.run(document, {runOnly: tags}).then((r) => r.violations.map("
            "(v) => v.id + ': ' + v.nodes.map((n) => n.target.join(' ')).join(', ')))",
            TAGS,
        )
        assert found == []


def people(stage: Stage) -> None:
    users = Users(stage.folder / "hmi" / "users.json")
    for name, role in (("adm", Role.ADMIN), ("anna", Role.OPERATOR), ("lea", Role.LEAD)):
        users.add(name, role, PIN)


@pytest.fixture(scope="module")
def desk(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with Stage(tmp_path_factory.mktemp("station"), HMI) as stage:
        people(stage)
        for number, outcome in enumerate(["FAIL", "UNSURE"] * 6):
            store(stage.config.evidence.folder, outcome, number)
        with in_thread(stage) as url:
            context = browser.new_context(
                viewport={"width": PX[0], "height": PX[1]}, has_touch=True
            )
            found = Desk(stage, context.new_page(), url)
            yield found
            context.close()
            assert found.errors == []


def test_nothing_of_the_verdict_goes_over_the_wire_before_the_answer(desk):
    """Every byte of every answer, its headers and every address; pictures are plain and alike."""
    parts = [
        json.loads(path.read_text())
        for path in desk.stage.config.evidence.folder.glob("*.verdict.json")
    ]
    secret = {part[key] for part in parts for key in ("serial", "result_id", "outcome")}
    secret |= {reason["code"] for part in parts for reason in part["reasons"]}
    secret |= {"harvested", "audit", "gold", "PASS", "score", "grid", "bundle", "reason", "second"}
    heard: list[Any] = []
    desk.page.on("response", lambda response: heard.append(response))
    with desk.page.expect_response("**/api/review/next") as asked:
        desk.page.reload()
    desk.ready()
    own = [found for found in heard if "/api/review/" in found.url]
    kept = {"/api/review/next", "/api/review/state"}
    pictures = [found for found in own if not any(found.url.endswith(path) for path in kept)]
    texts = [asked.value.text()]
    for found in own:
        texts += [found.url.removeprefix(desk.url), json.dumps(found.all_headers())]
    wire = "\n".join(texts).lower()
    assert [word for word in secret if word.lower() in wire] == []
    assert len(pictures) == 3
    images = [cv2.imdecode(np.frombuffer(p.body(), np.uint8), -1) for p in pictures]
    assert {image.shape for image in images} == {(480, 480)}, "grey: no overlay, and of one size"
    assert set(asked.value.json()) == {
        "look", "product", "name", "wanted", "parts", "close", "dispute",
    }  # fmt: skip


def test_ok_and_ng_cost_the_same_and_look_the_same(desk):
    desk.ready()
    desk.no_violations()
    mm = Panel(PANELS[PX], PX).px_per_mm
    boxes = {name: desk.page.locator(f".answer.{name}").bounding_box() for name in ("ok", "ng")}
    ok, ng = boxes["ok"], boxes["ng"]
    assert (ok["width"], ok["height"], ok["y"]) == (ng["width"], ng["height"], ng["y"])
    assert min(ok["width"], ok["height"]) >= PRIMARY_MM * mm
    middle = desk.page.locator(".answer.cannot_tell").bounding_box()
    assert middle["x"] - ok["x"] - ok["width"] >= APART_MM * mm - 0.5
    colours = desk.page.evaluate(
        "['.answer.ok', '.answer.ng'].map((name) => "
        "getComputedStyle(document.querySelector(name)).background)"
    )
    assert colours[0] == colours[1]
    for name in ("ok", "ng"):
        before = len(desk.labels)
        desk.press(f".answer.{name}")
        desk.page.wait_for_selector(".answers .next")
        assert len(desk.labels) == before + 1, "saved by one tap"
        if name == "ng":
            assert desk.page.locator(".tile").count() == 0, "cells are asked for blind"
        desk.no_violations()
        desk.page.wait_for_timeout(350)
        desk.press(".answers .next")
        desk.ready()
        desk.page.wait_for_timeout(350)
    last = desk.labels
    assert [row["label"] for row in last] == ["OK", "NG", "NG"]
    assert [row["more"].get("cells") for row in last] == [None, "asked", "skipped"]
    assert all(row["blind"] and row["reviewer"] == "anna" for row in last)
    assert all(row["more"]["sure"] and 0 < row["more"].get("ms", 1) < 60_000 for row in last)


def test_cells_by_block_then_cell_and_a_changed_answer_is_a_second_record(desk):
    desk.ready()
    before = len(desk.labels)
    desk.press(".sure")
    desk.page.wait_for_timeout(350)
    desk.press(".answer.ng")
    desk.page.wait_for_selector(".paint")
    top = desk.page.locator(".zoomable").nth(2)
    top.locator(".tap").nth(5).click()  # block row 1, column 1
    top.locator(".tap").nth(0).click()
    top.locator(".tap").nth(6).click()
    desk.page.get_by_role("button", name="dent").click()
    desk.page.wait_for_timeout(350)
    desk.press(".answers .next")
    desk.page.wait_for_selector(".told .tile")
    painted = desk.labels[-1]
    assert (painted["defect"], painted["cells"]) == ("dent", {"top": [[4, 4], [5, 6]]})
    assert painted["blind"] and painted["more"]["sure"] is False
    desk.page.locator(".change").get_by_role("button", name="OK").click()
    desk.page.get_by_text("Noted as changed").wait_for()
    changed = desk.labels[-1]
    assert (changed["label"], changed["blind"]) == ("OK", False)
    assert len(desk.labels) == before + 3
    desk.page.keyboard.press("ArrowRight")
    desk.ready()


def test_keys_answer_but_not_while_somebody_types(desk):
    desk.ready()
    before = len(desk.labels)
    desk.page.evaluate("document.querySelector('.review').append(document.createElement('input'))")
    desk.page.locator(".review input").focus()
    desk.page.keyboard.press("1")
    desk.page.keyboard.press("3")
    desk.page.wait_for_timeout(200)
    assert len(desk.labels) == before and desk.page.locator(".answer.ok").count() == 1
    desk.page.evaluate("document.querySelector('.review input').remove()")
    desk.page.keyboard.press("2")
    desk.page.wait_for_selector(".answers .next")
    assert desk.labels[-1]["label"] == "cannot_tell"
    desk.page.keyboard.press("ArrowRight")
    desk.ready()


def test_a_reply_that_is_lost_is_asked_for_again_and_counts_once(desk):
    desk.ready()
    before = len(desk.labels)
    sent: list[str] = []

    def lose(route: Any) -> None:
        sent.append(route.request.post_data)
        route.fetch()  # the server has it
        if len(sent) < 3:
            route.abort()
        else:
            route.continue_()

    desk.page.route("**/answer", lose)
    desk.press(".answer.ok")
    desk.page.wait_for_selector(".told", timeout=20_000)
    desk.page.unroute("**/answer")
    assert len(sent) == 3 and len(set(sent)) == 1
    assert len(desk.labels) == before + 1
    desk.press(".answers .next")
    desk.ready()


CLIPPED = """() => [document.documentElement, document.querySelector('main'),
  ...document.querySelectorAll('main button')].filter((e) => e.scrollWidth > e.clientWidth + 1
  || (e.tagName === 'MAIN' && e.scrollHeight > e.clientHeight + 1)).map((e) => e.textContent)"""


@pytest.mark.parametrize("language", ["de", "zh", "pseudo"])
def test_every_language_has_room_and_every_text_is_there(desk, language):
    for screen, shown in (("review", ".answer:not([aria-disabled])"), ("history", ".rows td")):
        desk.page.goto(f"{desk.url}?lang={language}#{screen}")
        desk.page.reload()
        desk.page.wait_for_selector(shown, timeout=30_000)
        assert desk.page.evaluate(CLIPPED) == []
        text = desk.page.locator("main").inner_text()
        assert "review." not in text and "history." not in text, "an id without its text"


def test_the_lead_decides_and_reads_figures_and_history(desk):
    desk.enter("lea")
    desk.page.wait_for_selector(".review .tabs")
    desk.page.locator(".review .tabs button").nth(1).click()
    desk.page.wait_for_selector(".about .serial")
    desk.ready()
    desk.press(".answer.ok")
    desk.page.wait_for_selector(".told")
    assert desk.labels[-1]["adjudicates"] and desk.labels[-1]["blind"]
    desk.page.locator(".review .tabs button").nth(2).click()
    desk.page.wait_for_selector(".figures table")
    desk.no_violations()
    desk.page.goto(f"{desk.url}?lang=zh#history")
    desk.page.reload()
    desk.page.wait_for_selector(".rows tbody tr")
    desk.no_violations()
    assert desk.page.evaluate("document.body.scrollWidth <= innerWidth")
    desk.page.locator(".row").first.click()
    desk.page.wait_for_selector(".known")
    desk.no_violations()


def test_an_empty_queue_says_when_a_part_comes(browser, tmp_path: Path):
    """A part that is newer than `rest_minutes` is not shown, and the reviewer is told so."""
    with Stage(tmp_path / "station", {**HMI, "review": {"rest_minutes": 90}}) as stage:
        people(stage)
        store(stage.config.evidence.folder, "FAIL", 1)  # an hour ago
        context = browser.new_context(viewport={"width": PX[0], "height": PX[1]})
        with in_thread(stage) as url:
            desk = Desk(stage, context.new_page(), url)
            desk.page.get_by_text("90 minutes after its inspection").wait_for(timeout=30_000)
        context.close()


def test_a_server_that_dies_between_tap_and_reply_loses_no_answer(browser, tmp_path: Path):
    """Killed while the answer is on its way; then it comes back, and so does the reviewer."""
    with Stage(tmp_path / "station", HMI) as stage:
        people(stage)
        store(stage.config.evidence.folder, "FAIL", 1)
        port = free_port()
        context = browser.new_context(viewport={"width": PX[0], "height": PX[1]})
        with served(stage, port) as server:
            desk = Desk(stage, context.new_page(), server.url)
            desk.ready()

            def die(route: Any) -> None:
                server.signal(signal.SIGKILL)
                server.process.wait()
                route.abort()

            desk.page.route("**/answer", die)
            desk.press(".answer.ng")
            desk.page.get_by_text("Your answer is kept").wait_for()
            assert desk.labels == []
            desk.page.unroute("**/answer")
        with served(stage, port):
            desk.enter("anna")
            desk.page.wait_for_selector(".told, .paint", timeout=30_000)
            (label,) = desk.labels
            assert (label["label"], label["blind"], label["reviewer"]) == ("NG", True, "anna")
            desk.page.reload()
            desk.page.wait_for_selector(".nothing", timeout=30_000)
            assert len(desk.labels) == 1
        context.close()
