"""The doctor: each line against a machine or a station that has the fault."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from forge_station import cli
from forge_station.capture import calibration_io
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.camera import CameraSettings
from forge_station.capture.projector import ProjectorSettings
from forge_station.capture.settings import DepthHeadSettings, HeadSettings
from forge_station.config import EvidenceConfig, HeadScanner, StationConfig, load_station
from forge_station.doctor import lines, machine, probe, station
from forge_station.doctor.lines import Line
from forge_station.errors import CaptureError
from forge_station.mes import machine as kernel
from forge_station.vlm.engine import Graph

DEMO = Path(__file__).parents[2] / "station_config" / "demo" / "station.yaml"


@pytest.fixture
def config(tmp_path: Path) -> StationConfig:
    found = load_station(DEMO)
    return replace(
        found, outbox=tmp_path / "outbox.sqlite", evidence=EvidenceConfig(tmp_path / "parts")
    )


def levels(found: Iterator[Line] | list[Line]) -> list[str]:
    return [line.level for line in found]


def test_the_whole_report_is_one_json_object_and_the_exit_code_its_worst_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == ["pass", "warn", "fail"].index(report["level"])
    topics = {line["topic"] for line in report["lines"]}
    assert {"versions", "provider", "clock", "network", "disk", "cameras"} <= topics
    (cpu,) = [line for line in report["lines"] if line["what"].startswith("CPUExecution")]
    assert cpu["level"] == "pass" and "runs" in cpu["what"]
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_a_broken_station_file_is_a_failed_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "station.yaml"
    file.write_text("line: nowhere.yaml\n")
    assert cli.main(["doctor", "--station", str(file)]) == 2
    out = capsys.readouterr().out
    assert "fail  station file" in out
    assert out.splitlines()[-1].endswith("1 fail")


def test_a_check_that_breaks_is_never_a_pass() -> None:
    def broken() -> Iterator[Line]:
        yield Line("pass", "x", "fine so far")
        raise RuntimeError("boom")

    def refused() -> Iterator[Line]:
        raise CaptureError("no camera", action="plug it in")
        yield

    assert levels(lines.guarded("x", broken)) == ["warn"]
    (line,) = lines.guarded("x", refused)
    assert line.level == "fail" and "Plug it in" in line.what
    assert lines.worst([Line("pass", "a", ""), Line("fail", "b", ""), Line("warn", "c", "")]) == (
        "fail"
    )


def test_a_probe_that_hangs_or_dies_is_told() -> None:
    assert "within 0.05 s" in lines.probe(["provider", "CPUExecutionProvider"], 0.05)["error"]
    assert "ended with code 1" in lines.probe(["nonsense"], 30.0)["error"]


def test_the_hand_written_graph_is_a_matrix_product(tmp_path: Path) -> None:
    path = tmp_path / "product.onnx"
    path.write_bytes(probe.product_graph())
    graph = Graph(path)
    a = np.arange(16, dtype=np.float32).reshape(4, 4)
    (product,) = graph.run({"a": a, "b": a})
    np.testing.assert_allclose(product, a @ a)


def test_a_provider_that_is_not_there_fails() -> None:
    found = list(machine.providers("CUDAExecutionProvider"))
    if any(line.level == "pass" and line.what.startswith("CUDA") for line in found):
        pytest.skip("there is a GPU here")
    assert any(line.level == "fail" and "CUDAExecutionProvider" in line.what for line in found)


def test_two_packages_that_share_their_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"opencv-python": "4.1", "opencv-python-headless": "5.0", "onnxruntime": "1.30"}
    monkeypatch.setattr(machine, "_version", installed.get)
    found = {line.topic: line for line in machine.versions()}
    assert found["opencv"].level == "fail" and found["onnxruntime"].level == "pass"


@pytest.mark.parametrize(
    ("state", "level", "text"),
    [
        (kernel.Clock(True, 0.0004), "pass", "0.40 ms off; chrony"),
        (kernel.Clock(False, 0.0), "warn", "not synchronised"),
        (None, "warn", "does not tell"),
    ],
)
def test_the_clock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: kernel.Clock | None,
    level: str,
    text: str,
) -> None:
    monkeypatch.setattr(machine.kernel, "clock", lambda: state)
    (tmp_path / "proc" / "12").mkdir(parents=True)
    (tmp_path / "proc" / "12" / "comm").write_text("chronyd\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "ptp0").touch()
    first, ptp = machine.clock(tmp_path / "proc", tmp_path / "dev")
    assert first.level == level and text in first.what
    assert "not used by ptp4l" in ptp.what


def test_the_network_matters_where_a_gige_camera_is(tmp_path: Path) -> None:
    card = tmp_path / "net" / "eth1"
    card.mkdir(parents=True)
    for name, text in (("operstate", "up"), ("mtu", "1500"), ("speed", "1000")):
        (card / name).write_text(text)
    limit = tmp_path / "proc" / "sys" / "net" / "core"
    limit.mkdir(parents=True)
    (limit / "rmem_max").write_text("212992\n")
    where = {"sys_net": tmp_path / "net", "proc": tmp_path / "proc"}
    assert set(levels(machine.network(False, **where))) == {"pass"}
    warned = [line for line in machine.network(True, **where) if line.level == "warn"]
    assert "1500" in warned[0].what and "MTU 9000" in warned[0].action
    assert "rmem_max" in warned[1].action


def test_an_outbox_on_a_network_share_fails_and_one_in_memory_warns(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnas:/x {tmp_path} nfs4 rw 0 0\n")
    assert machine.file_system(tmp_path, mounts) == "nfs4"
    assert "fail" in levels(machine.disk(tmp_path / "new", "outbox", durable=True, mounts=mounts))
    assert "fail" not in levels(machine.disk(tmp_path, "evidence", mounts=mounts))
    mounts.write_text(f"tmpfs {tmp_path} tmpfs rw 0 0\n")
    found = list(machine.disk(tmp_path, "outbox", durable=True, mounts=mounts))
    assert any(line.level == "warn" and "memory" in line.what for line in found)


def test_a_full_or_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.kernel, "disk", lambda path: kernel.Disk(10_000_000, 10**12))
    monkeypatch.setattr(machine, "_fsync_s", lambda folder: 0.4)
    found = {line.level: line for line in machine.disk(tmp_path, "outbox")}
    assert "0.0 GB free" in found["fail"].what and "400.0 ms" in found["warn"].what


def test_bundle_and_certificate_of_the_demo(config: StationConfig) -> None:
    found = {line.topic: line for line in station.bundle(config)}
    assert found["bundle"].level == "pass" and found["certificate"].level == "pass"
    found = {line.topic: line for line in station.bundle(replace(config, trusted_keys=()))}
    assert found["certificate"].level == "warn" and "advisory" in found["certificate"].what
    absent = replace(config, bundle=config.evidence.folder)
    assert levels(lines.guarded("bundle", lambda: station.bundle(absent))) == ["fail"]


def test_a_broker_that_is_away_and_a_port_that_is_none(
    config: StationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(station.link, "CONNECT_TIMEOUT_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        away = replace(config, broker="external", mqtt=replace(config.mqtt, port=port))
        (line,) = station.broker(away)
        assert line.level == "fail" and "outbox" in line.action
        server.listen()
        done = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        done.start()
        (line,) = station.broker(away)
        done.join(5)
        assert line.level == "fail"


@pytest.fixture
def head(tmp_path: Path) -> HeadSettings:
    matrix = np.array([[500.0, 0, 31.5], [0, 500, 23.5], [0, 0, 1]])
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = 300.0
    spec = PatternSpec(column_bits=3, steps=3)
    lens = Optics((64, 48), matrix)
    known = Calibration("h", lens, lens, np.eye(4), pose, spec, notes={"date": "2020-01-01"})
    calibration_io.save(known, tmp_path / "h.yaml")
    images = tmp_path / "images"
    images.mkdir()
    picture = np.random.default_rng(0).integers(0, 255, (48, 64), dtype=np.uint8)
    for k in range(3):
        cv2.imwrite(str(images / f"{k}.png"), np.roll(picture, k))
    return HeadSettings(
        name="h",
        camera=CameraSettings("replay", str(images)),
        projector=ProjectorSettings("window"),
        calibration=tmp_path / "h.yaml",
    )


def test_a_camera_must_give_a_frame_of_the_size_it_was_calibrated_with(
    head: HeadSettings, tmp_path: Path
) -> None:
    assert levels(station.light(head)) == ["pass"]
    (camera,) = station.eye(head)
    assert camera.level == "pass" and "64x48" in camera.what
    lens = replace(calibration_io.load(head.calibration).camera, image_size=(640, 480))
    other = replace(calibration_io.load(head.calibration), camera=lens)
    calibration_io.save(other, tmp_path / "other.yaml")
    (camera,) = station.eye(replace(head, calibration=tmp_path / "other.yaml"))
    assert camera.level == "fail" and "calibrated 640x480" in camera.what
    gone = replace(head, camera=CameraSettings("replay", str(tmp_path / "none")))
    assert levels(station.eye(gone)) == ["fail"]
    assert levels(station.eye(replace(head, camera=CameraSettings("nobody")))) == ["fail"]
    assert levels(station.light(replace(head, projector=ProjectorSettings("nobody")))) == ["fail"]
    depth = DepthHeadSettings("d", head.camera)
    assert levels(station.eye(depth)) == ["pass"]


def test_every_head_of_a_station_is_looked_at(head: HeadSettings, config: StationConfig) -> None:
    found = lines.guarded(
        "scanner", lambda: station.scanner(replace(config, scanner=HeadScanner("head", (head,))))
    )
    assert levels(found) == ["pass", "warn", "pass"]
    assert {line.topic for line in found} == {"head h"}


def test_an_old_calibration_is_to_be_checked_and_one_without_tray_fails(
    head: HeadSettings, tmp_path: Path
) -> None:
    (line,) = station.calibration(head)
    assert line.level == "warn" and "--check" in line.action
    bare = replace(calibration_io.load(head.calibration), tray_from_camera=None)
    calibration_io.save(bare, tmp_path / "bare.yaml")
    (line,) = station.calibration(replace(head, calibration=tmp_path / "bare.yaml"))
    assert line.level == "fail" and "--tray" in line.action


def test_a_password_that_others_can_read_is_told(config: StationConfig, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    file.chmod(0o644)
    mqtt = replace(config.mqtt, username="u", password_file=file)
    (line,) = station.secret_files(replace(config, mqtt=mqtt))
    assert line.level == "warn" and "secret" not in line.what
    file.chmod(0o600)
    (line,) = station.secret_files(replace(config, mqtt=mqtt))
    assert line.level == "pass"
    file.chmod(0o640)
    release = replace(config.release, report_key=file)
    (line,) = station.secret_files(replace(config, release=release))
    assert line.level == "warn", "the station's own private key"


def test_a_simulated_or_replayed_scanner_is_not_a_line(
    config: StationConfig, tmp_path: Path
) -> None:
    pytest.importorskip("numba", reason="the simulated scanner needs the extra demo")
    assert levels(station.scanner(config)) == ["warn"]
    raw = yaml.safe_load(DEMO.read_text())
    raw["scanner"] = {"driver": "replay", "folder": str(tmp_path)}
    for key in ("line", "bundle", "outbox", "evidence"):
        raw[key] = str((DEMO.parent / raw[key]).resolve())
    raw["trusted_keys"] = []
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert levels(station.scanner(load_station(file))) == ["fail"]
