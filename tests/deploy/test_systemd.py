"""The unit: systemd accepts it, it exposes little, and it agrees with what the station does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_station import cli
from forge_station.config import Runtime
from forge_station.doctor import machine

ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSED = 2.5
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deploy/systemd"


@pytest.fixture
def unit(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (folder / "forge-station.service").read_text(encoding="utf-8").splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def here(folder: Path, tmp_path: Path) -> Path:
    """The unit with a program that this machine has: systemd looks whether it is there."""
    text = (folder / "forge-station.service").read_text(encoding="utf-8")
    changed, count = re.subn(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text)
    assert count == 1
    path = tmp_path / "forge-station.service"
    path.write_text(changed, encoding="utf-8")
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    command = [ANALYZE, "--no-pager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@needs_systemd
def test_systemd_accepts_the_unit_without_a_word(here):
    done = analyze("verify", here)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_hears_of_a_misspelt_key(here):
    here.write_text(here.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "WatchdogSecs" in analyze("verify", here).stderr


@needs_systemd
def test_the_unit_exposes_no_more_than_stated(here):
    done = analyze("security", "--offline=true", here)
    found = re.search(r"exposure level for forge-station\.service: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert float(found[1]) <= MOST_EXPOSED


def test_the_command_is_one_that_the_station_has(unit):
    (command,) = unit["ExecStart"]
    program, *arguments = command.split()
    assert Path(program).name == "forge-station"
    args = cli.build_parser().parse_args(arguments)
    assert args.station == Path("/etc/forge-station/station.yaml")


def test_restarts_and_times_agree_with_the_station(unit):
    assert unit["Type"] == ["notify"] and unit["Restart"] == ["always"]
    assert unit["RestartPreventExitStatus"] == [str(cli.USAGE_ERROR)]
    assert float(unit["TimeoutStopSec"][0]) > Runtime().stop_grace_s
    assert 3 <= float(unit["WatchdogSec"][0]) <= Runtime().part_limit_s


def test_nobody_but_root_changes_what_the_station_runs(unit):
    assert unit["User"] == ["forge"] and unit["NoNewPrivileges"] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["AmbientCapabilities"] == unit["CapabilityBoundingSet"] == ["CAP_NET_BIND_SERVICE"]
    assert unit["WorkingDirectory"] == [f"/var/lib/{unit['StateDirectory'][0]}"]


def test_the_clock_can_be_asked_for(unit):
    """The health message tells whether it is synchronised; ProtectClock would deny the question."""
    assert any("adjtimex" in item for item in unit["SystemCallFilter"])
    assert "ProtectClock" not in unit


def test_receive_buffers_are_those_that_the_doctor_asks_for(folder):
    (line,) = [
        line
        for line in (folder / "60-forge-station.conf").read_text().splitlines()
        if not line.startswith("#")
    ]
    name, value = line.split(" = ")
    assert name == "net.core.rmem_max" and int(value) == 4 * machine.GIGE_BUFFER_BYTES


def test_the_user_is_the_units_and_may_use_cameras(folder, unit):
    lines = (folder / "forge-station.sysusers.conf").read_text().splitlines()
    (user,) = [line.split() for line in lines if line.startswith("u ")]
    assert user[1] == unit["User"][0]
    assert {tuple(line.split()) for line in lines if line.startswith("m ")} == {
        ("m", user[1], "video"),
        ("m", user[1], "render"),
    }


def test_the_rules_match_any_usb3_vision_camera(folder):
    lines = (folder / "60-forge-station.rules").read_text().splitlines()
    (rule,) = [line for line in lines if line and not line.startswith("#")]
    for part in rule.split(", "):
        assert re.fullmatch(r'[A-Z]+(\{[\w/]+\})?(==|=|\+=)"[^"]*"', part), part
    assert 'ENV{ID_USB_INTERFACES}=="*:ef0500:*"' in rule and 'GROUP="video"' in rule
