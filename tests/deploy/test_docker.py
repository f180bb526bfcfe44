"""The images: linted, and in agreement with the station, its unit and each other."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import try_install
from deploy.try_install import instructions
from forge_station import cli
from forge_station.config import Runtime

HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
FILES = ("Dockerfile", "Dockerfile.l4t")


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deploy/docker"


@pytest.fixture
def compose(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (extra dev)")
@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(folder, name):
    done = subprocess.run(
        [str(HADOLINT), str(folder / name)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_an_image_takes_wheels_alone_and_runs_without_root(folder, name):
    found = instructions(folder / name)
    assert sum(word == "FROM" for word, _ in found) == 2
    assert [argument for word, argument in found if word == "COPY"] == [
        ". /wheelhouse",
        "--from=build /opt/forge-station /opt/forge-station",
    ]
    (install,) = [text for word, text in found if word == "RUN" and "pip install" in text]
    assert "--no-index" in install
    last = [text for word, text in found if word == "USER"][-1]
    assert last.isdigit() and int(last) > 0
    assert any(f"useradd --system --uid {last} " in text for _, text in found)


@pytest.mark.parametrize("name", FILES)
def test_what_an_image_starts_is_the_station_and_its_probe(folder, name):
    found = dict(instructions(folder / name))
    assert found["ENTRYPOINT"] == '["/opt/forge-station/bin/forge-station"]'
    arguments = yaml.safe_load(found["CMD"])
    assert cli.build_parser().parse_args(arguments).station.parent == Path("/etc/forge-station")
    assert "http://127.0.0.1:9464/healthz" in found["HEALTHCHECK"]
    program = yaml.safe_load(found["HEALTHCHECK"].partition(" CMD ")[2])
    compile(program[2], "healthcheck", "exec")


def test_the_images_differ_only_where_they_must(folder):
    """Two files, not one with switches: what is equal must stay so."""
    one, other = (instructions(folder / name) for name in FILES)
    assert [word for word, _ in one] == [word for word, _ in other]
    allowed = {"ARG", "HEALTHCHECK"}
    different = {a[0] for a, b in zip(one, other, strict=True) if a != b} - allowed
    assert different == {"RUN"}
    assert sum(a != b for a, b in zip(one, other, strict=True) if a[0] == "RUN") == 1


def test_a_trial_knows_every_instruction_of_the_image(folder, monkeypatch, tmp_path):
    """Steps in order, in the stage that they belong to, as the user they run as."""
    done: list[tuple[str, str]] = []

    def fresh_root(image: str, work: Path, number: int) -> Path:
        done.append(("FROM", image))
        (work / str(number)).mkdir()
        return work / str(number)

    def inside(stage: try_install.Stage, command: list[str], user: str) -> int:
        done.append((f"RUN {stage.root.name} {user}", command[-1]))
        (stage.root / "opt/forge-station").mkdir(parents=True, exist_ok=True)
        return 0

    monkeypatch.setattr(try_install, "_fresh_root", fresh_root)
    monkeypatch.setattr(try_install, "_inside", inside)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/one.whl").write_text("a wheel")
    stage = try_install.build(folder / "Dockerfile", tmp_path / "wheels", tmp_path)
    assert [name for name, _ in done] == ["FROM", "RUN 0 0", "RUN 0 0", "FROM", "RUN 1 0"]
    assert done[0] == done[3] == ("FROM", "debian:bookworm-slim")
    assert (tmp_path / "0/wheelhouse/one.whl").is_file() and not (
        tmp_path / "1/wheelhouse"
    ).exists()
    assert (stage.user, stage.folder) == ("10001", "/var/lib/forge-station")
    assert stage.entry == ["/opt/forge-station/bin/forge-station"]


def test_a_trial_refuses_what_it_does_not_know(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text("ADD . /\n")
    with pytest.raises(ValueError, match="instruction ADD"):
        try_install.build(file, tmp_path, tmp_path)


def test_a_trial_runs_one_command_after_each_pair_of_dashes():
    assert try_install.split(["file", "wheels"]) == [["file", "wheels"]]
    assert try_install.split(["file", "--", "doctor", "--", "demo", "--help"]) == [
        ["file"], ["doctor"], ["demo", "--help"],
    ]  # fmt: skip


def test_compose_gives_the_station_no_more_than_it_needs(compose):
    station = compose["services"]["station"]
    assert station["read_only"] is True and station["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in station["security_opt"]
    assert "privileged" not in station
    grace = float(station["stop_grace_period"].removesuffix("s"))
    assert grace > Runtime().stop_grace_s
    targets = {volume.split(":")[1] for volume in station["volumes"]}
    assert targets == {"/etc/forge-station", "/var/lib/forge-station"}


def test_compose_pins_the_broker_and_keeps_its_data(compose):
    broker = compose["services"]["broker"]
    assert re.fullmatch(r"eclipse-mosquitto:2\.\d+\.\d+", broker["image"])
    named = {volume.split(":")[0] for volume in broker["volumes"]} & set(compose["volumes"])
    assert named == {"broker"}


def test_the_broker_takes_its_file_and_listens_on_loopback_alone(mosquitto, folder, tmp_path):
    text = (folder / "mosquitto/mosquitto.conf").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("listener")] == [
        "listener 1883 127.0.0.1"
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = text.replace("listener 1883", f"listener {port}").replace("/mosquitto/data", "/tmp")
    file = tmp_path / "mosquitto.conf"
    file.write_text(here.replace("persistence true", "persistence false"), encoding="utf-8")
    command = shlex.split(f"{mosquitto} -c {file}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            assert process.poll() is None, process.stdout.read()
        finally:
            process.kill()
    assert time.monotonic() < deadline


def test_the_commented_listener_for_the_plant_is_whole(folder):
    text = (folder / "mosquitto/mosquitto.conf").read_text(encoding="utf-8")
    plant = dict(
        line[1:].split(" ", 1) for line in text.splitlines() if re.match(r"#[a-z_]+ \S", line)
    )
    assert plant["listener"] == "8883" and plant["allow_anonymous"] == "false"
    assert plant["require_certificate"] == plant["use_identity_as_username"] == "true"
    assert {"cafile", "certfile", "keyfile", "acl_file"} <= plant.keys()
