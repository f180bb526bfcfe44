"""`forge-station bundle`: its exit codes are those that its help names."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_station import cli
from tests.bundles import rig


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
