"""`forge-station rollout`: its help teaches what it does, with examples that can be typed."""

from __future__ import annotations

import re
import shlex

import pytest

from forge_station import cli
from forge_station.rollout import help_texts as texts

EXAMPLE = re.compile(r"^  (forge-station .*?)(?:   .*)?$", re.MULTILINE)


def helped(capsys: pytest.CaptureFixture[str], *action: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["rollout", *action, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_action_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    offered = re.findall(r"^    (\w+) ", helped(capsys), re.MULTILINE)
    assert offered == list(texts.ACTIONS)


@pytest.mark.parametrize("action", texts.ACTIONS)
def test_help_has_exit_codes_and_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], action: str
) -> None:
    text = helped(capsys, action)
    assert re.search(r"^exit codes: 0 .*64 wrong usage", text, re.MULTILINE)
    assert all(len(line) <= 100 for line in text.splitlines())
    examples = EXAMPLE.findall(text)
    assert examples
    for example in examples:
        words = shlex.split(example)[1:]
        assert words[:2] == ["rollout", action]
        cli.build_parser().parse_args(words)
