"""`forge-station capture`: live scans, a recorded session, and its replay bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

pytest.importorskip("numba", reason="the scanner of these tests is simulated (extra demo)")

from forge_station import capture_command, cli
from forge_station.capture import replay, session
from forge_station.capture.base import Frame, Trigger
from forge_station.capture.replay import ReplayScanner
from forge_station.config import load_station
from forge_station.line import open_line
from forge_station.pipeline import Job

DEMO = Path(__file__).parents[2] / "station_config" / "demo" / "station.yaml"


@pytest.fixture(scope="module")
def station(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's station with one pose and small images."""
    raw = yaml.safe_load(DEMO.read_text())
    for key in ("line", "bundle", "outbox", "evidence"):
        raw[key] = str((DEMO.parent / raw[key]).resolve())
    raw["trusted_keys"] = []
    raw["scanner"] = {"driver": "sim", "poses": "front_side", "image_size": [320, 240], "seed": 4}
    file = tmp_path_factory.mktemp("capture") / "station.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("scan ", "frame "))]


def digests(text: str) -> list[str]:
    return [line.rsplit("digest ", 1)[1] for line in lines_of(text)]


def test_a_recorded_session_is_replayed_bit_for_bit(
    station: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, folder = tmp_path / "latest.png", tmp_path / "monday"
    words = ["capture", "--station", str(station), "--count", "2", "--picture", str(picture)]
    assert cli.main([*words, "--record", str(folder)]) == 0
    live = capsys.readouterr().out
    assert json.loads(live.splitlines()[-1]) == {
        "scans": 2, "failed": 0, "recorded": str(folder),
    }  # fmt: skip
    assert "valid 9" in live and "2 poses" in live and "sharp" in live
    first = picture.read_bytes()
    assert cv2.imdecode(np.frombuffer(first, np.uint8), cv2.IMREAD_COLOR).shape[1] == 640
    assert sorted(path.name for path in folder.iterdir()) == ["scan-000001", "scan-000002"]
    assert cli.main(["capture", "--replay", str(folder), "--picture", str(picture)]) == 0
    again = capsys.readouterr().out
    assert digests(again) == digests(live) and len(set(digests(live))) == 2
    assert picture.read_bytes() == first
    assert cli.main([*words, "--record", str(folder)]) == cli.USAGE_ERROR
    assert "something in the folder" in capsys.readouterr().err


def test_a_replayed_scan_has_the_same_verdict_byte_for_byte(
    station: Path, tmp_path: Path, inspector: Any
) -> None:
    """All that may differ are the times it took."""
    config = load_station(station)
    line = open_line(config)
    (trigger,) = line.triggers(1)
    scanner = line.scanner_of(trigger)
    stacks = scanner.capture(trigger)
    replay.write(tmp_path / "scan-000001", stacks, scanner.calibrations)
    player = ReplayScanner(tmp_path, "once")
    played = player.capture(Trigger("another", "x"))
    assert player.finished
    for got, taken in zip(played, stacks, strict=True):
        assert got.images.tobytes() == taken.images.tobytes()
        for name in ("exposures", "pattern", "calibration_digest", "name", "meta"):
            assert getattr(got, name) == getattr(taken, name)
    product = config.line.product(trigger.part_number)
    job = Job("00000000-0000-7000-8000-000000000000", trigger.serial, product)
    verdicts = []
    for given, source in ((stacks, scanner), (played, player)):
        found = inspector.inspect_stacks(job, given, source.calibrations).verdict
        same = replace(found, timings_ms={}, begin_time="", end_time="").to_dict()
        verdicts.append(json.dumps(same).encode())
    assert verdicts[0] == verdicts[1]
    assert b'"parts"' in verdicts[0]


def test_a_damaged_scan_fails_and_the_next_one_follows(
    station: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    words = ["capture", "--station", str(station), "--count", "2", "--record", str(folder)]
    cli.main([*words, "--picture", str(tmp_path / "p.png")])
    capsys.readouterr()
    victim = next((folder / "scan-000001").glob("*/e0_00.png"))
    victim.write_bytes(victim.read_bytes()[:-20])
    code = cli.main(["capture", "--replay", str(folder), "--picture", str(tmp_path / "p.png")])
    one, two = lines_of(capsys.readouterr().out)
    assert code == 2
    assert "FAILED" in one and victim.name in one
    assert "digest" in two


def test_a_camera_alone_is_shown_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(2)
    made = [rng.integers(0, 255, (24, 32), dtype=np.uint8) for _ in range(3)]
    for k, image in enumerate(made):
        cv2.imwrite(str(images / f"{k}.png"), image)
    folder = tmp_path / "frames"
    words = ["capture", "--camera", f"replay:{images}", "--count", "3"]
    words += ["--record", str(folder), "--picture", str(tmp_path / "p.png")]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert len(lines_of(out)) == 3 and "32x24 Mono8" in out
    entries = session.read(folder)
    digest = {Frame(image, 0).sha256 for image in made}
    assert {Frame(session.load(entry), 0).sha256 for entry in entries} <= digest


def test_an_absent_camera_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["capture", "--camera", f"replay:{tmp_path}/none"]) == cli.USAGE_ERROR
    assert "none" in capsys.readouterr().err


def test_sharpness_falls_with_blur_and_not_with_bit_depth() -> None:
    image = np.random.default_rng(0).integers(0, 255, (60, 80), dtype=np.uint8)
    sharp = capture_command.sharpness(image)
    assert capture_command.sharpness(cv2.GaussianBlur(image, (0, 0), 2.0)) < 0.3 * sharp
    deep = image.astype(np.uint16) * 257
    assert capture_command.sharpness(deep) == pytest.approx(sharp, rel=1e-3)
    colour = np.repeat(image[..., None], 3, axis=2)
    assert capture_command.sharpness(colour) == pytest.approx(sharp, rel=1e-3)
