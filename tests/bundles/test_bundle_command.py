"""`forge-station bundle`: its help teaches what it does, and its exit codes are those it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forge_station import bundle_command, cli
from tests.bundles import rig

EXAMPLE = re.compile(r"^  (forge-station .*?)(?:   .*)?$", re.MULTILINE)


def helped(capsys: pytest.CaptureFixture[str], *action: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["bundle", *action, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_action_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    offered = re.findall(r"^    (\w+) ", helped(capsys), re.MULTILINE)
    assert offered == list(bundle_command._HELP)


@pytest.mark.parametrize("action", bundle_command._HELP)
def test_help_has_exit_codes_and_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], action: str
) -> None:
    text = helped(capsys, action)
    assert re.search(r"^exit codes: 0 .*64 wrong usage", text, re.MULTILINE)
    assert all(len(line) <= 100 for line in text.splitlines())
    examples = EXAMPLE.findall(text)
    assert examples or action in ("list", "rollback"), "these take no argument of their own"
    for example in examples:
        cli.build_parser().parse_args(shlex.split(example)[1:])


@pytest.mark.parametrize("action", ["sign", "pack", "allow", "verify", "install"])
def test_a_damaged_bundle_is_refused_with_exit_code_1(
    tmp_path: Path, station_file: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert cli.main(["bundle", "keygen", str(tmp_path / "release")]) == 0
    rig.write(tmp_path / "b")
    (tmp_path / "b" / "notes.json").write_text("{}")
    key, out = ["--key", str(tmp_path / "release.pem")], ["--out", str(tmp_path / "out")]
    more = {"sign": key, "pack": out, "allow": [*key, *out], "verify": ["--unsigned"]}
    words = more.get(action, ["--station", str(station_file)])
    before = set(tmp_path.iterdir())
    assert cli.main(["bundle", action, str(tmp_path / "b"), *words]) == 1
    assert "forge-station: " in capsys.readouterr().err
    added = {path.name for path in set(tmp_path.iterdir()) - before}
    assert added == ({"store"} if action == "install" else set()), "a store is made where none is"
