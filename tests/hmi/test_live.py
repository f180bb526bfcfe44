"""The live screen in a real browser: every state, language and panel size; what happens to it when
its server hangs, dies, or sends ten thousand parts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from forge_station.hmi.context import Context
from forge_station.hmi.feed import Feed
from forge_station.hmi.settings import Panel
from tests.hmi.conftest import in_thread, served, wait_for
from tests.hmi.stage import ADVISORY, PANELS, Stage

AXE = Path(__file__).with_name("axe.min.js")
pytestmark = pytest.mark.timeout(900)
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
LANGUAGES = {"en": "EN", "de": "DE", "zh": "中文"}
SHOTS = os.environ.get("HMI_SHOTS")
"""A folder: every state is also written there as a picture, to be looked at."""
EVENTS = int(os.environ.get("HMI_EVENTS", "1000"))
NOT_LIVE_S = 3.5
LEAST_SHARE = 0.40
"""Of the screen's height, for the verdict."""
CUT = """[...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && e.clientWidth
  && getComputedStyle(e).overflow !== 'visible'
  && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1))
  .map(e => `${e.className}: ${e.textContent}`)"""


@pytest.fixture(scope="module", params=sorted(PANELS), ids=lambda px: f"{px[0]}x{px[1]}")
def screen(
    request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Screen]:
    """A panel with the page of a station on it."""
    px = request.param
    hmi = {"panel": {"diag_in": PANELS[px], "px": list(px)}, "takt_s": 2.0}
    with Stage(tmp_path_factory.mktemp("station"), hmi) as stage:
        context = Context.of(stage.config)
        with in_thread(stage, context) as url:
            size = {"width": px[0], "height": px[1]}
            window = browser.new_context(viewport=size, has_touch=True)
            yield Screen(stage, window.new_page(), url, px, context.feed)
            window.close()


class Screen:
    """The browser's page, and the station that it shows."""

    def __init__(self, stage: Stage, page: Any, url: str, px: tuple[int, int], feed: Feed) -> None:
        self.stage, self.page, self.url, self.px, self.feed = stage, page, url, px, feed
        self.mm = Panel(PANELS[px], px).px_per_mm
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))

    def open(self, language: str) -> None:
        self.page.goto(f"{self.url}?lang={language}")
        self.page.wait_for_selector(".band")
        self.page.evaluate(AXE.read_text() + "; 0")

    def speak(self, language: str) -> None:
        if language == "pseudo":
            self.open("pseudo")
        else:
            self.page.get_by_role("button", name=LANGUAGES[language], exact=True).click()
            tag = {"en": "en-GB", "de": "de-DE", "zh": "zh-CN"}[language]
            self.page.wait_for_selector(f"html[lang='{tag}']")

    def shows(self, result_id: str) -> None:
        self.page.wait_for_selector(f".band[data-id='{result_id}']")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Asked from outside: the page's own policy forbids to evaluate a text inside it."""
        assert wait_for(lambda: self.page.evaluate(expression), seconds), expression

    def settle(self) -> None:
        self.page.evaluate(
            "async () => { await document.fonts.ready;"
            " await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r))); }"
        )

    def require_good(self, name: str) -> None:
        """No barrier that axe knows, nothing to scroll, nothing cut off that must be read."""
        self.settle()
        if SHOTS:
            self.page.screenshot(path=f"{SHOTS}/{self.px[0]}-{name}.png")
        found = self.page.evaluate(
            "tags => axe.run(document, {runOnly: {type: 'tag', values: tags},"
            " resultTypes: ['violations']})",
            TAGS,
        )
        told = [
            (item["id"], [(node["target"], node["failureSummary"]) for node in item["nodes"]])
            for item in found["violations"]
        ]
        assert told == [], name
        assert self.page.evaluate(
            "[document.documentElement, document.body].every(e => e.scrollWidth <= e.clientWidth"
            " && e.scrollHeight <= e.clientHeight)"
        ), f"{name}: there is something to scroll"

    def size_mm(self, selector: str) -> tuple[float, float]:
        box = self.page.locator(selector).first.bounding_box()
        return box["width"] / self.mm, box["height"] / self.mm

    def ink_mm(self) -> tuple[float, float]:
        """Width and height of the verdict's word as it is painted."""
        image = cv2.imdecode(
            np.frombuffer(self.page.locator(".band .word").screenshot(), np.uint8), cv2.IMREAD_COLOR
        )
        away = np.abs(image.astype(int) - image[0, 0].astype(int)).sum(axis=2) > 200
        rows, columns = np.flatnonzero(away.any(axis=1)), np.flatnonzero(away.any(axis=0))
        return (np.ptp(columns) + 1) / self.mm, (np.ptp(rows) + 1) / self.mm


def test_every_state_in_every_language(screen: Screen) -> None:
    stage = screen.stage
    screen.open("en")
    for language in ("en", "de", "zh", "pseudo"):  # no part yet: nothing to show a verdict of
        screen.speak(language)
        screen.require_good(f"empty-{language}")
    states: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
        ("pass", "PASS", {}, ()),
        ("fail", "FAIL", {}, ()),
        ("unsure", "UNSURE", {"drift": {"level": 2, "text": "scores rise"}}, ()),
        ("error", "ERROR", {"camera": False}, ("CAMERA_LOST",)),
        ("advisory", "UNSURE", ADVISORY, ("NOT_CERTIFIED",)),
        ("alarm", "PASS", {"link": False}, ("LINK_DOWN", "OUTBOX_70")),
    ]
    screen.open("en")
    for name, outcome, status, alarms in states:
        stage.status(**status)
        stage.alarms(*alarms, severity=900 if name == "error" else 500)
        result_id = stage.part(outcome, advisory=name == "advisory")
        screen.shows(result_id)
        screen.until(f"document.querySelectorAll('.alarm.on').length === {int(bool(alarms))}")
        seen = 0 if outcome == "ERROR" else 3
        screen.until(
            "[...document.querySelectorAll('.view img')].filter(i => i.naturalWidth).length"
            f" == {seen}"
        )
        for language in ("en", "de", "zh"):
            screen.speak(language)
            screen.require_good(f"{name}-{language}")
            _require_readable(screen, chinese=language == "zh")
            assert screen.page.evaluate(CUT) == [], f"{name}-{language}"
            if name == "error":
                _require_translated(screen, language)
        screen.open("pseudo")
        screen.shows(result_id)
        screen.require_good(f"{name}-pseudo")
        _require_readable(screen, chinese=False)
    assert screen.page.locator(".asof").count() == 0
    stage.end()
    screen.page.wait_for_selector(".silent")
    for language in ("en", "de", "zh", "pseudo"):
        screen.speak(language)
        screen.page.wait_for_selector(".silent")
        told = screen.page.locator(".alarm .asof").inner_text()  # of then, not of now
        assert re.search(r"\d\d:\d\d:\d\d", told)
        screen.require_good(f"ended-{language}")
    assert screen.errors == []
    assert all(url.startswith(screen.url) for url in screen.asked)


def test_not_live_in_every_language(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers, but does not see the station."""
    screen.stage.status()
    result_id = screen.stage.part("PASS")
    screen.open("en")
    screen.shows(result_id)
    monkeypatch.setattr(screen.feed, "_changed", lambda path: {}["gone"])
    for language in ("en", "de", "zh", "pseudo"):
        screen.speak(language)
        screen.page.wait_for_selector(".not-live")
        screen.require_good(f"notlive-{language}")
        box, band = (screen.page.locator(item).bounding_box() for item in (".not-live", ".band"))
        assert box["y"] <= band["y"] and box["x"] <= band["x"]
        assert box["width"] >= band["width"] and box["height"] >= band["height"]
    monkeypatch.undo()
    screen.page.wait_for_selector(".not-live", state="detached")
    assert screen.errors == []


def _require_translated(screen: Screen, language: str) -> None:
    """What to do in the language of the page; the station's own words are marked as English."""
    todo = {"en": "Check the camera", "de": "Kabel und Strom", "zh": "检查相机"}[language]
    assert screen.page.locator(".band .where").inner_text().startswith(todo)
    assert screen.page.locator(".band .own code").inner_text() == "CAMERA_LOST"
    assert screen.page.locator(".band .own [lang=en]").inner_text() == "the camera is gone"
    assert screen.page.locator(".alarm .detail [lang=en]").inner_text() == "text of CAMERA_LOST"


def test_a_lower_panel_has_no_boxes_and_nothing_is_cut_off(tmp_path: Path, browser: Any) -> None:
    """10.1 inches, 136 mm high: what asks for an action must not be what is cut off."""
    panel = {"panel": {"diag_in": 10.1, "px": [1280, 800]}}
    with Stage(tmp_path / "station", panel) as stage, in_thread(stage) as url:
        stage.status(link=False)
        stage.alarms("LINK_DOWN")
        shown = stage.part("UNSURE")
        window = browser.new_context(viewport={"width": 1280, "height": 800})
        page = window.new_page()
        page.goto(url)
        page.wait_for_selector(f".band[data-id='{shown}']")
        page.wait_for_selector(".alarm.on")
        assert page.locator(".views").count() == page.locator(".facts").count() == 0
        for name in (".band", ".alarm", ".foot"):
            box = page.locator(name).bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 800, name
        assert page.locator(".band").bounding_box()["height"] >= LEAST_SHARE * 800
        assert page.evaluate(CUT) == []
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/low.png")
        window.close()


def _require_readable(screen: Screen, *, chinese: bool) -> None:
    """Sizes on the panel, in millimetres."""
    width, height = screen.ink_mm()
    room = screen.size_mm(".band .word")
    assert (44.0 if chinese else 35.0) <= height <= room[1] + 1
    assert width <= room[0] + 1
    assert screen.size_mm(".band")[1] >= LEAST_SHARE * screen.px[1] / screen.mm
    for selector in (".languages .button", ".top .who", ".tools .button"):
        assert min(screen.size_mm(selector)) >= 14.0, selector
    smallest = screen.page.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.childNodes.length"
        " && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest / screen.mm >= 2.6


def test_a_server_that_hangs_covers_the_verdict_and_one_that_dies_doubles_nothing(
    stage: Stage, browser: Any
) -> None:
    stage.status()
    stage.part("PASS")
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    with served(stage) as server:
        page.goto(server.url)
        page.wait_for_selector(".band.PASS")
        assert page.locator(".not-live").count() == 0
        stopped_at = time.monotonic()
        server.signal(signal.SIGSTOP)
        page.wait_for_selector(".not-live")
        assert time.monotonic() - stopped_at <= NOT_LIVE_S + _lag_s(page)
        box, band = (page.locator(item).bounding_box() for item in (".not-live", ".band"))
        assert box["y"] <= band["y"] and box["height"] >= band["height"]
        missed = [stage.part("FAIL", picture=False) for _ in range(3)]
        server.signal(signal.SIGCONT)
        page.wait_for_selector(f".band[data-id='{missed[-1]}']")
        page.wait_for_selector(".not-live", state="detached")
        assert page.locator(".strip svg").count() == 4
        port = server.port
    page.wait_for_selector(".not-live")
    missed.append(stage.part("UNSURE", picture=False))  # the line runs on
    with served(stage, port):
        page.wait_for_selector(f".band[data-id='{missed[-1]}']", timeout=60_000)
        page.wait_for_selector(".not-live", state="detached")
        assert page.locator(".strip svg").count() == 5
        assert page.locator(".counts b").all_inner_texts() == ["1", "1", "3", "0"]
    context.close()


def _lag_s(page: Any) -> float:
    """By how much this machine, busy as it is, is late with a timer of the browser."""
    late = page.evaluate(
        "async () => { let worst = 0; for (let k = 0; k < 5; k++) { const t = performance.now();"
        " await new Promise(r => setTimeout(r, 100)); worst = Math.max(worst, performance.now() - t"
        " - 100); } return worst; }"
    )
    return 2 * float(late) / 1000 + 0.3


def test_a_part_that_cannot_be_drawn_covers_the_screen(tmp_path: Path, browser: Any) -> None:
    """The heart of the page goes on beating: an old verdict must not stand beside it."""
    with Stage(tmp_path / "station", {}) as stage:
        shown = stage.part("PASS")
        with in_thread(stage) as url:
            window = browser.new_context()
            page = window.new_page()
            page.goto(url)
            page.wait_for_selector(f".band[data-id='{shown}']")
            odd = {"id": "odd", "outcome": "FAIL", "reasons": [], "serial": "W", "ms": 1}
            snapshot = {**Feed.of(stage.config).snapshot(), "boot": None, "parts": [odd]}
            page.route(
                "**/api/events",
                lambda route: route.fulfill(
                    content_type="text/event-stream",
                    body=f"retry: 100\nevent: snapshot\ndata: {json.dumps(snapshot)}\n\n",
                ),
            )
            page.reload()
            page.wait_for_selector(".not-live")
            page.wait_for_timeout(1000 * NOT_LIVE_S)  # it is no pause of the stream that covers it
            assert page.locator(".not-live").count() == 1 and page.locator(".band").count() == 0
            page.unroute("**/api/events")
            page.wait_for_selector(f".band[data-id='{shown}']")
            assert page.locator(".not-live").count() == 0
            window.close()


def test_many_parts_grow_neither_heap_nor_page_and_are_painted_at_once(
    screen: Screen, request: pytest.FixtureRequest
) -> None:
    if screen.px != (1280, 800):
        pytest.skip("once is enough")
    stage, page = screen.stage, screen.page
    stage.status()
    screen.open("en")
    painted = """async (mark) => {
      window.painted = [];
      new MutationObserver(() => {
        const id = document.querySelector('.band')?.dataset.id;
        requestAnimationFrame(() => window.painted.push([id, Date.now()]));
      }).observe(document.querySelector('main'), {subtree: true, attributes: true,
        attributeFilter: ['data-id'], childList: true});
    }"""
    page.evaluate(painted, None)
    waited: list[float] = []
    for _ in range(20):
        told_at = time.time()
        result_id = stage.part("PASS", picture=False)
        screen.shows(result_id)
        found = dict(reversed(page.evaluate("window.painted")))
        waited.append(1000 * (found.get(result_id, 1000 * time.time()) / 1000 - told_at))
        time.sleep(0.05)
    screen.open("en")
    sizes = []
    for tenth in range(11):
        if tenth:
            for number in range(EVENTS // 10):
                result_id = stage.part(("PASS", "FAIL")[number % 2], picture=False)
                time.sleep(0.002)  # as fast as a page can be sent them, not one snapshot
            page.wait_for_selector(f".band[data-id='{result_id}']", timeout=120_000)
        sizes.append(
            page.evaluate(
                "() => { gc(); gc(); return [performance.memory.usedJSHeapSize,"
                " document.getElementsByTagName('*').length]; }"
            )
        )
    heap, nodes = zip(*sizes[3:], strict=True)
    print(
        f"event to paint p50 {np.percentile(waited, 50):.0f} ms, "
        f"p95 {np.percentile(waited, 95):.0f} ms; heap {heap[0]} to {heap[-1]} B, "
        f"{nodes[0]} to {nodes[-1]} elements over {EVENTS} parts"
    )
    assert max(nodes) <= 1.05 * min(nodes)
    assert heap[-1] <= 1.05 * heap[0] + 200_000
    assert screen.errors == []


def test_a_login_at_the_panel_and_what_it_opens(tmp_path: Path, browser: Any) -> None:
    from forge_station.hmi.context import folder_of
    from forge_station.hmi.users import Role, Users

    with Stage(tmp_path / "station", {"commands": {"key": "/nowhere/panel.pem"}}) as stage:
        users = Users(folder_of(stage.config) / "users.json")
        users.add("anna", Role.ADMIN, "246801")
        users.add("ben", Role.OPERATOR, "135790")
        stage.status()
        stage.alarms("NO_CONSUMER")
        stage.part("FAIL")
        _log_in(stage, browser)


def _log_in(stage: Stage, browser: Any) -> None:
    with in_thread(stage) as url:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(".band.FAIL")
        assert page.locator(".tabs .button").count() == 0
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("button", name="ben", exact=True).click()
        page.evaluate(AXE.read_text() + "; 0")
        found = page.evaluate(
            "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}})", TAGS
        )
        assert [item["id"] for item in found["violations"]] == []
        for pin in ("000000", "135790"):
            for digit in pin:
                page.locator(".login .keys").get_by_role("button", name=digit, exact=True).click()
                page.wait_for_timeout(100)  # a PIN is typed faster than a button counts twice
            page.locator(".login .go").click()
            if pin == "000000":
                page.get_by_text("Name or PIN is wrong.").wait_for()
        page.get_by_role("button", name="log out").wait_for()
        assert page.locator(".band.FAIL").count() == 1
        assert page.get_by_role("button", name="Seen").bounding_box()["height"] >= 22 * (
            Panel().px_per_mm - 0.05
        )
        pause = page.get_by_role("button", name="Hold: pause after this part")
        asked: list[str] = []
        page.on("request", lambda item: "/order/" in item.url and asked.append(item.url))
        pause.hover()
        page.mouse.down()
        page.wait_for_timeout(200)
        page.mouse.up()
        page.wait_for_timeout(1200)
        assert asked == []  # a touch is not enough
        page.mouse.down()
        with page.expect_response("**/api/order/stop"):
            pass
        page.mouse.up()
        page.get_by_text("private key cannot be read").wait_for()  # the reason, at the panel
        context.clear_cookies()  # the session is over: a viewer, in place
        page.get_by_role("button", name="Review").click()
        page.get_by_role("button", name="Log in").wait_for()
        assert page.locator(".band.FAIL").count() == 1
        context.close()
