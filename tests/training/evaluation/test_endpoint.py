"""Cases put to a model behind an endpoint: a server on this machine plays it."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.training.evaluation.chat_server import Chat, serving
from training import evaluate
from training.evaluation import by_endpoint
from training.evaluation.by_endpoint import Asking
from training.evaluation.case_files import FILE, Case, read_cases
from training.evaluation.endpoint import (
    ChatClient,
    Endpoint,
    EndpointError,
    EndpointRefused,
    ReplyFile,
)
from training.evaluation.examples import Examples
from training.evaluation.rows import Row

QUESTION = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]


def oracle(text: str, images: int) -> str:
    """Answers by the words of the question, always the same."""
    if "Which required part is missing" in text:
        return "Looking at the list.\nAnswer: A"
    if "divide" in text:
        return "score: 4/10\nfront:\nr5: 8,9\nside:\nnone\ntop:\nnone"
    if "Part 1:" in text:
        return "Part 1: No\nPart 2: D"
    return "The odd one is clear.\nAnswer: **A**"


@pytest.fixture
def chat() -> Iterator[Chat]:
    with serving(oracle) as running:
        yield running


def client(chat: Chat, path: Path, **fields: Any) -> ChatClient:
    endpoint = Endpoint(chat.url, "m", first_wait_s=0.001, **fields)
    return ChatClient(endpoint, ReplyFile(path))


def ask(chat: Chat, folder: Path, case: Case, **fields: Any) -> Row:
    asking = Asking(folder, Examples.of(folder), **fields)
    return by_endpoint.run_case(client(chat, folder / "replies.jsonl"), case, asking)


def of_task(folder: Path, task: str) -> Case:
    return next(c for c in read_cases(folder) if isinstance(c, Case) and c.task == task)


@pytest.fixture
def folder(simulated: Path, tmp_path: Path) -> Path:
    """The simulated cases, writable."""
    (tmp_path / FILE).write_text((simulated / FILE).read_text())
    (tmp_path / "scenes").symlink_to(simulated / "scenes")
    return tmp_path


def test_a_busy_server_is_asked_again_and_the_key_is_sent(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    chat.failures = [429, 503, 500]
    with client(chat, tmp_path / "r.jsonl", key_env="SOME_KEY") as asked:
        reply = asked.ask(QUESTION, {"case": "x"})
    assert "odd one" in reply.text and len(chat.keys) == 4 and set(chat.keys) == {"Bearer secret"}
    assert chat.requests[0]["temperature"] == 0.0 and chat.requests[0]["model"] == "m"
    assert "secret" not in (tmp_path / "r.jsonl").read_text()


@pytest.mark.parametrize(
    ("failures", "error", "words"),
    [
        ([401], EndpointRefused, ["refuses the key", "OPENAI_API_KEY"]),
        ([404], EndpointRefused, ["no such address or model", "--endpoint"]),
        ([400], EndpointError, ["refuses the request", "HTTP 400", "not now"]),
        ([500, 500], EndpointError, ["does not answer", "2 tries", "HTTP 500"]),
    ],
)
def test_what_a_server_refuses_is_one_clear_error(
    chat: Chat, tmp_path: Path, failures: list[int], error: type[EndpointError], words: list[str]
) -> None:
    chat.failures = failures
    with pytest.raises(error) as raised:
        client(chat, tmp_path / "r.jsonl", tries=2).ask(QUESTION, {})
    assert type(raised.value) is error and all(word in str(raised.value) for word in words)
    assert not (tmp_path / "r.jsonl").exists()


def test_a_reply_that_was_given_is_never_asked_for_again(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = client(chat, path).ask(QUESTION, {"case": "x"})
    with path.open("a") as file:
        file.write('{"key": "half a li')  # a killed run
    again = client(chat, path)
    assert again.ask(QUESTION, {"case": "x"}).text == first.text and len(chat.requests) == 1
    other = [{"role": "user", "content": "another"}]
    offline = ChatClient(Endpoint(chat.url, "m"), ReplyFile(path), offline=True)
    assert offline.ask(QUESTION, {}).stored
    with pytest.raises(EndpointError, match="no stored reply"):
        offline.ask(other, {})
    chat.answer = lambda *_: "two"
    again.ask([{"role": "user", "content": [{"type": "text", "text": "!"}]}], {})
    assert len(ReplyFile(path)) == 2  # the torn line spoils no other


def test_fields_can_be_added_and_taken_out(chat: Chat, tmp_path: Path) -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9}
    client(chat, tmp_path / "r.jsonl", extra=extra).ask(QUESTION, {})
    assert "max_tokens" not in chat.requests[0]
    assert chat.requests[0]["max_completion_tokens"] == 9


def test_a_kit_is_asked_for_its_odd_and_its_missing_part(chat: Chat, folder: Path) -> None:
    case = of_task(folder, "assembly")
    row = ask(chat, folder, case)
    assert row.error == "" and row.direct == row.answer == "A" and row.letters == ("A",)
    parts = list(case.product.parts)  # type: ignore[union-attr]
    assert row.missing == (parts[0],) and row.missing_direct == parts[0]
    assert row.missing_options == len(parts) + 1 and row.outcome == "FAIL"
    assert [e.question for e in row.exchanges] == ["ASSYVERI", "MISSING"]
    assert "Answer: **A**" in row.exchanges[0].reply and row.exchanges[0].parser
    text = chat.text_of(0)
    assert all(part.replace("_", " ") in text for part in parts)
    assert "Measured length, width and height" in text and "mm per pixel" in text
    address = chat.requests[0]["messages"][-1]["content"][0]["image_url"]["url"]
    png = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    assert picture.shape == (588, 1176, 3)


def test_without_sizes_no_millimetre_of_a_part_is_told(chat: Chat, folder: Path) -> None:
    row = ask(chat, folder, of_task(folder, "workpiece"), sizes=False)
    assert "Measured" not in chat.text_of(0) and row.sizes is False


def test_a_surface_is_asked_twice_and_its_cells_are_read(chat: Chat, folder: Path) -> None:
    row = ask(chat, folder, of_task(folder, "surface"))
    assert row.defect == "dent" and row.outcome == "FAIL" and row.score == 4.0
    assert row.cells == ((0, 4, 7), (0, 4, 8)) and row.cells_true and row.warnings == ()


def test_what_cannot_be_read_is_unsure_and_counted(chat: Chat, folder: Path) -> None:
    chat.answer, chat.finish = lambda *_: "I would rather not say.", "length"
    row = ask(chat, folder, of_task(folder, "surface"))
    assert row.outcome == "UNSURE" and row.defect == "" and row.cells is None
    assert {"SURFINSP:NO_ANSWER", "SURFINSP:CUT_OFF", "GRID:NO_VIEW"} <= set(row.warnings)
    tray = ask(chat, folder, of_task(folder, "workpiece"))
    assert tray.outcome == "UNSURE" and tray.direct == "" and tray.letters == ()


def test_points_as_text_show_no_picture(chat: Chat, folder: Path) -> None:
    ask(chat, folder, of_task(folder, "workpiece"), style="coordinates")
    content = chat.requests[0]["messages"][-1]["content"]
    assert all(part["type"] == "text" for part in content) and "Part B:\n" in chat.text_of(0)


def test_the_published_composite(chat: Chat, folder: Path) -> None:
    row = ask(chat, folder, of_task(folder, "workpiece"), style="forge", probes=True)
    assert row.probes == () and "Each part has a colour" in chat.text_of(0)


def test_grounding_questions_have_their_own_right_answers(chat: Chat, folder: Path) -> None:
    row = ask(chat, folder, of_task(folder, "workpiece"), probes=True)
    kinds = {probe.kind: probe for probe in row.probes}
    assert set(kinds) == {"mark_to_place", "place_to_mark"}
    assert all(probe.answer == "A" for probe in row.probes)
    assert kinds["place_to_mark"].true in "ABCDEF" and "Measured" not in chat.text_of(1)


def test_the_judged_picture_is_the_last_of_all(chat: Chat, folder: Path) -> None:
    case = of_task(folder, "surface")
    line = json.loads(next(t for t in (folder / FILE).read_text().splitlines() if case.id in t))
    reference = {**line, "input": {**line["input"], "references": [line["input"]["scene"]]}}
    (folder / FILE).write_text(json.dumps(reference))
    row = ask(chat, folder, of_task(folder, "surface"), setting="reference")
    kinds = [part["type"] for part in chat.requests[0]["messages"][-1]["content"]]
    assert kinds == ["text", "image_url", "text", "image_url", "text"]
    assert row.setting == "reference" and "this is what is right" in chat.text_of(0)


def test_a_product_without_a_reference_is_an_error_of_the_case(chat: Chat, folder: Path) -> None:
    row = ask(chat, folder, of_task(folder, "surface"), setting="reference")
    assert row.outcome == "ERROR" and "too few references" in row.error
    assert "training.cases --references" in row.error and not chat.requests


def test_solved_examples_come_with_their_right_answers(chat: Chat, folder: Path) -> None:
    case = of_task(folder, "surface")
    line = json.loads(next(t for t in (folder / FILE).read_text().splitlines() if case.id in t))
    good = {**line, "id": "good", "truth": {"defect": "normal", "grids": {}, "score": 10}}
    bad = {**line, "id": "bad"}
    (folder / FILE).write_text("\n".join(json.dumps(item) for item in (line, good, bad)))
    row = ask(chat, folder, case, setting="demonstration")
    text = chat.text_of(0)
    assert row.error == "" and text.count("Right answer:") == 2
    assert "Right answer:\nPart 1: Yes" in text and "Right answer:\nPart 1: No\nPart 2: " in text
    assert sum(p["type"] == "image_url" for p in chat.requests[0]["messages"][-1]["content"]) == 3
    grid = chat.text_of(1)
    assert "Right answer:\nscore: 10/10\nfront:\nnone\nside:\nnone\ntop:\nnone" in grid


def test_the_command_runs_replays_offline_and_stops_at_a_wrong_key(
    chat: Chat,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out" / "rows.jsonl"
    given = ["evaluate", "--endpoint", chat.url, "--model", "m", "--cases", str(folder)]
    given += ["--out", str(out), "--jobs", "3", "--html", str(tmp_path / "report.html")]
    monkeypatch.setattr(sys, "argv", given)
    assert evaluate.main() == 0
    first = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert first["model"] == "m" and first["asked"] == 5 and first["surface"]["cases"] == 1
    assert first["assembly"]["reading"]["value"] is None
    page = (tmp_path / "report.html").read_text()
    assert "Published figures" in page and "Gemini-3-Flash" in page
    monkeypatch.setattr(sys, "argv", [*given, "--fresh", "--offline"])
    assert evaluate.main() == 0
    again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert again["asked"] == 0 and len(chat.requests) == 5
    assert again["surface"]["score_srcc"] == first["surface"]["score_srcc"]
    chat.failures = [403] * 20
    monkeypatch.setattr(sys, "argv", [*given, "--fresh", "--max-tokens", "7"])
    assert evaluate.main() == 1
    assert "refuses the key" in capsys.readouterr().err
