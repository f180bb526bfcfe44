"""`forge-station replay` and `evidence`: the verdict of then, byte for byte, from what was kept."""

from __future__ import annotations

import io
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station import cli, evidence_command, replay_command
from forge_station.capture.base import PatternStack, Scanner, Trigger
from forge_station.config import load_station
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import CaptureError, InputError
from forge_station.evidence import rejudge
from forge_station.evidence.case import Case, pack, unpack
from forge_station.evidence.folder import Folder
from forge_station.line import SimulatedLine, open_line
from forge_station.permit import Permit
from forge_station.station import Station, open_station
from training.data.loaders.evidence import read_evidence

NUMBERS = (1, 5, 6, 8)
"""Of the demo's trays: all kinds of products, some right."""


def station_file(repository: Path, folder: Path, **evidence: object) -> Path:
    demo = repository / "station_config" / "demo"
    content = yaml.safe_load((demo / "station.yaml").read_text())
    content |= {
        "line": str(demo / "line.yaml"),
        "bundle": str(demo / "bundle"),
        "broker": "none",
        "outbox": str(folder / "outbox.sqlite"),
        "evidence": {"folder": str(folder / "parts"), "stacks": "fail", **evidence},
        "trusted_keys": [str(demo / "certificate_key.pem")],
        "runtime": {"threads": 1},
    }
    content["scanner"] |= {"image_size": [320, 240], "poses": "front_side", "exposures": [1.0]}
    file = folder / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


class Sometimes:
    """The simulated scanner, which fails on one serial and sees nothing on another."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner, self.calibrations = scanner, scanner.calibrations

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        if trigger.serial == "fails":
            raise CaptureError("the head does not answer")
        stacks = self.scanner.capture(trigger)
        if trigger.serial == "dark":
            return [replace(stack, images=np.zeros_like(stack.images)) for stack in stacks]
        return stacks

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def stored(repository, tmp_path_factory) -> tuple[Path, dict[str, Verdict]]:
    """A station file, and what its station said of parts that it kept."""
    folder = tmp_path_factory.mktemp("station")
    file = station_file(repository, folder)
    config = load_station(file)
    line = open_line(config)

    def parts() -> Iterator[Trigger]:
        for number in NUMBERS:
            yield from line.triggers(1, number)
        yield Trigger("fails", "NUT-M8-5")
        yield Trigger("dark", "NUT-M8-5")
        yield Trigger("unknown", "NO-SUCH")

    def scanner_of(trigger: Trigger) -> Sometimes:
        return Sometimes(line.scanner_of(trigger))

    found = {}
    with open_station(config, scanner_of) as station:
        keeper = station.keeper
        assert keeper is not None
        for done in station.run(parts()):
            found[done.verdict.serial] = done.verdict
            assert keeper.drain(60)
        found["passed"], found["advisory"] = _passing(station, line)
        assert keeper.drain(60) and keeper.facts().fault is None
    return file, found


def _passing(station: Station, line: SimulatedLine) -> tuple[Verdict, Verdict]:
    """A part that passes when the thresholds are so loose that the reading alone decides, and the
    same when the certificate is taken away."""
    loose = {"size_tolerance": 100.0, "defect_unsure": 1.0, "defect_fail": 1.0}
    limits = replace(station.inspector.thresholds, **loose, answer_disagree=1.0)
    station.inspector = replace(station.inspector, thresholds=limits)
    for trigger in line.triggers(20, 20):
        passed = station.inspect(trigger).verdict
        if passed.outcome is Outcome.PASS:
            permit = Permit(refusal="taken away")
            station.inspector = replace(station.inspector, permit=permit)
            return passed, station.inspect(trigger).verdict
    raise AssertionError("the demo bundle passes none of these trays")


def replay(file: Path, *words: str) -> tuple[int, list[str]]:
    args = cli.build_parser().parse_args(["replay", "--station", str(file), *words])
    out = io.StringIO()
    return replay_command.run(args, out), out.getvalue().splitlines()


def evidence(file: Path, *words: str) -> list[str]:
    args = cli.build_parser().parse_args(["evidence", "--station", str(file), *words])
    out = io.StringIO()
    assert evidence_command.run(args, out) == 0
    return out.getvalue().splitlines()


def test_every_kind_of_verdict_comes_out_the_same(stored):
    file, found = stored
    outcomes = {verdict.outcome for verdict in found.values()}
    assert outcomes == set(Outcome)
    code, lines = replay(file, "--all")
    summary = json.loads(lines[-1])
    assert code == replay_command.SAME, "\n".join(lines)
    assert summary["differs"] == summary["not_done"] == 0 and summary["same"] >= len(found)


def test_the_pattern_images_give_the_same_verdict_too(stored):
    file, found = stored
    failed = next(item for item in found.values() if item.outcome is Outcome.FAIL and item.parts)
    code, lines = replay(file, failed.result_id, "--images")
    assert (code, json.loads(lines[-1])["same"]) == (replay_command.SAME, 1)


def test_a_verdict_that_was_changed_is_found_and_shown(stored, tmp_path):
    file, _ = stored
    evidence(file, "--export", str(tmp_path / "copy"), "--outcome", "FAIL")
    path = sorted((tmp_path / "copy").glob("*.verdict.json"))[0]
    data = json.loads(path.read_text())
    data["parts"][0]["probability"] = 0.123456
    path.write_text(json.dumps(data))
    code, lines = replay(file, str(path))
    assert code == replay_command.DIFFERS
    assert any("A probability" in line and "0.123456" in line for line in lines)


def test_another_bundle_is_compared_not_required(stored, repository, tmp_path):
    file, found = stored
    other = tmp_path / "candidate"
    shutil.copytree(repository / "station_config/demo/bundle", other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["version"], manifest["thresholds"] = "9.9.9", {"size_tolerance": 0.011}
    (other / "manifest.json").write_text(json.dumps(manifest))
    code, lines = replay(file, "--all", "--bundle", str(other))
    summary = json.loads(lines[-1])
    assert code == replay_command.DIFFERS and summary["not_done"] == 0
    assert any("9.9.9" in line for line in lines)
    assert sum(summary["outcomes"].values()) == summary["parts"] >= len(found)


def test_a_bundle_that_is_not_here_is_named(stored, tmp_path, repository):
    file, _ = stored
    lost = yaml.safe_load(file.read_text())
    (tmp_path / "bundles").mkdir()
    lost["bundle"] = str(tmp_path / "bundles")
    moved = tmp_path / "station.yaml"
    moved.write_text(yaml.safe_dump(lost))
    code, lines = replay(moved, "--last", "1")
    assert code == replay_command.NOT_DONE and "Give its folder with --bundle" in lines[0]
    shutil.copytree(repository / "station_config/demo/bundle", tmp_path / "bundles" / "one")
    assert replay(moved, "--last", "1", "--bundle", str(tmp_path / "bundles"))[0] == 0


def test_list_export_and_label(stored, tmp_path):
    file, found = stored
    lines = evidence(file, "--outcome", "ERROR", "--json")
    assert {json.loads(line)["serial"] for line in lines} == {"fails", "dark", "unknown"}
    assert "GB of 50 GB; deleted so far: none" in evidence(file)[-1]
    failed = next(item for item in found.values() if item.outcome is Outcome.FAIL and item.parts)
    evidence(file, failed.result_id, "--mark", "held")
    assert failed.result_id in evidence(file, "--label", "held")[0]
    evidence(file, failed.result_id, "--export", str(tmp_path / "out"))
    (verdict,) = (tmp_path / "out").glob("*.verdict.json")
    seen = read_evidence(verdict)
    assert seen.verdict == failed and seen.sheet is not None
    rebuilt = evidence(file, "--rebuild")
    assert rebuilt[0].startswith("index made anew") and "left alone" not in rebuilt[0]
    assert failed.result_id in evidence(file, "--label", "held")[0]


def test_a_case_is_the_same_after_a_round_trip(stored):
    file, _ = stored
    with Folder.of(load_station(file).evidence) as folder:
        for row in folder.find(evidence_command.query_of(_all())):
            part = rejudge.load(folder.path / row.files[0])
            again = Case.from_bytes(part.case.to_bytes(), "again")
            assert again.decider == part.case.decider and again.job == part.case.job
            assert (again.scan, again.problems) == (part.case.scan, part.case.problems)
            for one, other in zip(part.case.parts, again.parts, strict=True):
                assert one.points.tobytes() == other.points.tobytes()
                assert np.array_equal(one.tray_from_part, other.tray_from_part)


def _all() -> Namespace:
    names = ("since", "until", "serial", "product", "label", "last")
    return Namespace(outcome=(), **dict.fromkeys(names))


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_points_are_packed_without_loss(count):
    rng = np.random.default_rng(count)
    points = rng.normal(0, 50, (count, 3)).astype(np.float32)
    if count > 6:
        points[3] = (np.nan, -0.0, np.inf)
    assert unpack(pack(points)).tobytes() == points.tobytes()
    with pytest.raises(ValueError, match="points are"):
        unpack(np.zeros((3, 3, 5), np.uint8))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100])
def test_a_damaged_case_is_one_clear_error(content):
    with pytest.raises(InputError, match="case"):
        Case.from_bytes(content, "x.case.npz")


def test_which_parts_must_be_said(stored):
    file, _ = stored
    assert cli.main(["replay", "--station", str(file)]) == 64
    assert cli.main(["replay", "--station", str(file), "no-such-part"]) == 64
