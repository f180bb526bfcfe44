"""Heads that give scans instead of pattern stacks, from the station file to the verdict."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("scipy", reason="part shapes need the extra demo")

from forge_station import config
from forge_station.capture import structured_light
from forge_station.capture.base import Trigger
from forge_station.capture.camera import CameraSettings
from forge_station.capture.settings import DepthHeadSettings
from forge_station.capture.sim import SimulatedScanner
from forge_station.contract.catalogue import by_id
from forge_station.contract.verdict import Outcome
from forge_station.errors import ConfigError
from forge_station.line import open_line
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.permit import CHECKS_ALONE
from forge_station.pipeline import Inspector, Job
from forge_station.sim import fasteners, rest_pose, scanner
from forge_station.station import Station
from tests.capture.test_genicam_cameras import missing
from tests.station.fake_model import FakeModel

NUT = "hex_nut M8"
LINE = """
line: l1
products:
  - {part_number: NUT, kind: single, checks: [workpiece], parts: {hex_nut M8: 1}}
"""
POSE = [[1, 0, 0, 0], [0, -1, 0, 0], [0, 0, -1, 380.5], [0, 0, 0, 1]]


def head(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "camera": {"driver": "gentl3d", "address": "1"}, **more}


def station_file(folder: Path, scanner_keys: dict[str, object]) -> Path:
    (folder / "line.yaml").write_text(LINE)
    file = folder / "station.yaml"
    data = {
        "line": "line.yaml", "bundle": "bundle", "scanner": {"driver": "depth", **scanner_keys},
        "outbox": "outbox.sqlite", "evidence": "evidence", "broker": "none", "mqtt": {"line": "l1"},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(data))
    return file


def test_3d_heads_are_named_in_the_station_file(tmp_path: Path) -> None:
    heads = [head("left", tray_from_camera=POSE), head("right", tray_from_camera=POSE)]
    loaded = config.load_station(station_file(tmp_path, {"heads": heads, "trigger_age_s": 2}))
    pose = tuple(tuple(float(x) for x in row) for row in POSE)
    assert loaded.scanner == config.DepthScanner(
        "depth",
        tuple(
            DepthHeadSettings(name, CameraSettings("gentl3d", "1"), pose)  # type: ignore[arg-type]
            for name in ("left", "right")
        ),
        2.0,
    )


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([], "heads: none"),
        ([head("a"), head("a")], "heads: a, a"),
        ([head("a", tray_from_camera=POSE), head("b")], r"heads\[1\].tray_from_camera: none"),
        ([head("a", tray_from_camera=POSE[:3])], r"heads\[0\].tray_from_camera"),
        ([head("a", tray_from_camera=[[2, 0, 0, 0], *POSE[1:]])], "a rotation and a translation"),
        ([head("a", timeout_s=0)], r"heads\[0\].timeout_s"),
        ([head("a", projector={"driver": "sim"})], r"heads\[0\].projector: unknown key"),
    ],
)
def test_wrong_heads_are_refused_with_their_place(
    tmp_path: Path, heads: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load_station(station_file(tmp_path, {"heads": heads}))


def test_a_scan_of_a_3d_head_is_judged_as_one_that_was_decoded_here() -> None:
    rng = np.random.default_rng(1)
    mesh = fasteners.build(by_id(NUT), rng)
    part = rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))
    rig = scanner.rig(scanner.scale_for(30.0, 30.0, 10.0))
    head = SimulatedScanner(lambda trigger: [part], rig, seed=1)
    stacks = head.capture(Trigger("S1"))
    inspector = Inspector(FakeModel({"A": (NUT, 0.98)}), permit=CHECKS_ALONE)  # type: ignore[arg-type]
    job = Job("r1", "S1", config.parse_line(yaml.safe_load(LINE), "").products[0])
    decoded = inspector.inspect_stacks(job, stacks, head.calibrations).verdict
    scans = [
        replace(scan, calibration_digest="")
        for scan in structured_light.decode_all(stacks, head.calibrations)
    ]
    given = inspector.inspect_stacks(job, scans, {}).verdict
    assert decoded.outcome is given.outcome is Outcome.PASS
    assert given.scan.calibration is None and decoded.scan.calibration
    assert replace(given.scan, calibration=decoded.scan.calibration) == decoded.scan
    assert given.parts == decoded.parts


def test_a_station_with_a_3d_head_ends_each_part_in_a_verdict(tmp_path: Path) -> None:
    """The ball of the virtual producer is no part on a tray: seen, and never passed."""
    try:
        import genicam
        import harvesters  # noqa: F401
    except ModuleNotFoundError:
        missing("harvesters", "pip install forge-station[genicam]")
    producer = str(Path(genicam.__file__).parent / "viky.cti")
    camera = {
        "driver": "gentl3d", "address": "0", "fps": 50, "open_timeout_s": 30,
        "options": {"producer": producer},
    }  # fmt: skip
    loaded = config.load_station(
        station_file(tmp_path, {"heads": [{"name": "top", "camera": camera, "recover_s": 30}]})
    )
    line = open_line(loaded)
    trigger = Trigger("S1", "NUT")
    with closing(line.scanner_of(trigger)), Outbox(loaded.outbox, ballast_bytes=0) as outbox:
        line.warm_up()
        station = Station(
            loaded,
            Inspector(FakeModel({"A": (NUT, 0.98)})),  # type: ignore[arg-type]
            line.scanner_of,
            outbox,
            Publisher(outbox, loaded.mqtt),
        )
        verdict = station.inspect(trigger).verdict
    assert verdict.scan.points > 100_000 and verdict.scan.source == "depth"
    assert verdict.scan.camera_pixel_mm == pytest.approx(1.0)
    assert verdict.outcome in (Outcome.UNSURE, Outcome.ERROR) and verdict.reasons
