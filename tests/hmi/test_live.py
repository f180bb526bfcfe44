"""The live screen in a real browser: every state, language and panel size; what happens to it when
its server hangs, dies, or sends ten thousand parts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from forge_station.hmi.settings import Panel
from tests.hmi.conftest import in_thread, served, wait_for
from tests.hmi.stage import ADVISORY, PANELS, Stage

AXE = Path(__file__).with_name("axe.min.js")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
LANGUAGES = {"en": "EN", "de": "DE", "zh": "中文"}
SHOTS = os.environ.get("HMI_SHOTS")
"""A folder: every state is also written there as a picture, to be looked at."""
EVENTS = int(os.environ.get("HMI_EVENTS", "1000"))
NOT_LIVE_S = 3.5


@pytest.fixture(scope="module", params=sorted(PANELS), ids=lambda px: f"{px[0]}x{px[1]}")
def screen(
    request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Screen]:
    """A panel with the page of a station on it."""
    px = request.param
    hmi = {"panel": {"diag_in": PANELS[px], "px": list(px)}, "takt_s": 2.0}
    with Stage(tmp_path_factory.mktemp("station"), hmi) as stage, in_thread(stage) as url:
        context = browser.new_context(viewport={"width": px[0], "height": px[1]}, has_touch=True)
        page = context.new_page()
        yield Screen(stage, page, url, px)
        context.close()


class Screen:
    """The browser's page, and the station that it shows."""

    def __init__(self, stage: Stage, page: Any, url: str, px: tuple[int, int]) -> None:
        self.stage, self.page, self.url, self.px = stage, page, url, px
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
            self.page.wait_for_function(f"document.documentElement.lang === '{tag}'")

    def shows(self, result_id: str) -> None:
        self.page.wait_for_selector(f".band[data-id='{result_id}']")

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
        screen.page.wait_for_function(
            f"document.querySelectorAll('.alarm.on').length === {int(bool(alarms))}"
        )
        if outcome != "ERROR":
            screen.page.wait_for_function(
                "[...document.querySelectorAll('.view img')].filter(i => i.naturalWidth).length == 3"
            )
        for language in ("en", "de", "zh"):
            screen.speak(language)
            screen.require_good(f"{name}-{language}")
            _require_readable(screen, chinese=language == "zh")
        screen.open("pseudo")
        screen.shows(result_id)
        screen.require_good(f"{name}-pseudo")
        _require_readable(screen, chinese=False)
        screen.open("en")
    stage.board.__exit__(None, None, None)  # the station ends
    screen.page.wait_for_selector(".silent")
    for language in ("en", "de", "zh", "pseudo"):
        screen.speak(language)
        screen.page.wait_for_selector(".silent")
        screen.require_good(f"ended-{language}")
    assert screen.errors == []
    assert all(url.startswith(screen.url) for url in screen.asked)


def _require_readable(screen: Screen, *, chinese: bool) -> None:
    """Sizes on the panel, in millimetres."""
    width, height = screen.ink_mm()
    assert (44.0 if chinese else 35.0) <= height <= 50.0
    assert width <= screen.size_mm(".band .word")[0] + 1
    assert screen.size_mm(".band")[1] >= 48
    for selector in (".languages .button", ".top .who", ".tools .button"):
        assert min(screen.size_mm(selector)) >= 14.0, selector
    smallest = screen.page.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.childNodes.length"
        " && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest / screen.mm >= 2.6
