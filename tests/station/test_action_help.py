"""Commands with actions teach each of them, with examples that can be typed and exit codes."""

from __future__ import annotations

import re
import shlex

import pytest

from forge_station import bundle_command, cli
from forge_station.rollout import help_texts

EXAMPLE = re.compile(r"^  (forge-station .*?)(?:   .*)?$", re.MULTILINE)
ACTIONS = {"bundle": bundle_command._HELP, "rollout": help_texts.ACTIONS}
EACH = [(command, action) for command, actions in ACTIONS.items() for action in actions]
WITHOUT_EXAMPLES = {("bundle", "list"), ("bundle", "rollback")}
"""They take no argument of their own."""


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ACTIONS)
def test_every_action_has_its_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    offered = re.findall(r"^    (\w+) ", helped(capsys, command), re.MULTILINE)
    assert offered == list(ACTIONS[command])


@pytest.mark.parametrize(("command", "action"), EACH)
def test_help_has_exit_codes_and_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], command: str, action: str
) -> None:
    text = helped(capsys, command, action)
    assert re.search(r"^exit codes: 0 .*64 wrong usage", text, re.MULTILINE)
    assert all(len(line) <= 100 for line in text.splitlines())
    examples = EXAMPLE.findall(text)
    assert bool(examples) != ((command, action) in WITHOUT_EXAMPLES)
    for example in examples:
        words = shlex.split(example)[1:]
        assert words[0] == command
        cli.build_parser().parse_args(words)
