"""How the page is served: its units, and to other machines only with TLS and users."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from forge_station import cli
from forge_station.hmi.context import folder_of
from forge_station.hmi.users import Role, Users
from tests.hmi.conftest import served
from tests.hmi.stage import REPOSITORY, Stage
from tests.mes.certificates import Authority

UNITS = REPOSITORY / "deploy" / "systemd"
MOST_EXPOSED = 2.0
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def test_other_machines_reach_it_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("page")
    lan = {"host": "0.0.0.0", "tls_cert": str(certificate), "tls_key": str(key)}
    with Stage(tmp_path / "station", lan) as stage:
        users = Users(folder_of(stage.config) / "users.json")
        users.add("anna", Role.ADMIN, "246801")
        trusted = ssl.create_default_context(cafile=str(authority.file))
        with served(stage, tls=trusted) as page:
            assert page.url.startswith("https://")
            with urllib.request.urlopen(f"{page.url}api/page", context=trusted) as answer:
                told = json.load(answer)
            assert told["has_users"] and told["names"] == []  # names are for the panel itself
            request = urllib.request.Request(
                f"{page.url}api/session/login",
                json.dumps({"name": "anna", "pin": "246801"}).encode(),
                {"origin": page.url.rstrip("/")},
            )
            with urllib.request.urlopen(request, context=trusted) as answer:
                assert "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(("inches", "told"), [(10.1, True), (12.1, False)])
def test_a_panel_that_is_too_low_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], inches: float, told: bool
) -> None:
    import socket

    panel = {"panel": {"diag_in": inches, "px": [1280, 800]}}
    with socket.socket() as taken, Stage(tmp_path / "station", panel) as stage:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cli.main(["hmi", "--station", str(stage.file), "--port", port])  # ends: it is taken
    assert ("136 mm high" in capfd.readouterr().err) == told


def test_a_taken_port_is_one_clear_error(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["hmi", "--station", str(stage.file), "--port", port]) == 64
    told = capfd.readouterr().err
    assert "the page cannot be served" in told and port in told and "Traceback" not in told


@pytest.mark.parametrize("name", ["forge-station-hmi", "forge-station-panel"])
@needs_systemd
def test_systemd_accepts_the_units_without_a_word(tmp_path: Path, name: str) -> None:
    done = _analyze("verify", _here(tmp_path, name))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_unit_of_the_page_exposes_little(tmp_path: Path) -> None:
    done = _analyze("security", "--offline=true", _here(tmp_path, "forge-station-hmi"))
    found = re.search(r"exposure level for forge-station-hmi\.service: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert float(found[1]) <= MOST_EXPOSED


def test_the_unit_runs_a_command_that_there_is() -> None:
    text = (UNITS / "forge-station-hmi.service").read_text()
    (command,) = re.findall(r"(?m)^ExecStart=\S+/forge-station (.+)$", text)
    args = cli.build_parser().parse_args(command.split())
    assert args.station == Path("/etc/forge-station/station.yaml")
    assert f"RestartPreventExitStatus={cli.USAGE_ERROR}" in text


def _here(folder: Path, name: str) -> Path:
    """The unit with a program that this machine has: systemd looks whether it is there."""
    text = (UNITS / f"{name}.service").read_text()
    path = folder / f"{name}.service"
    path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text))
    return path


def _analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run(
        [ANALYZE, "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )
