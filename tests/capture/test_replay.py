"""Recorded scans: bit-exact round trip; every kind of damage named with file and field."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

from forge_station.capture import calibration_io, replay
from forge_station.capture.base import PatternStack, Scanner, Trigger
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.errors import CaptureError, InputError, StationError


def head() -> Calibration:
    matrix = np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]])
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = 300.0
    spec = PatternSpec(column_bits=2, steps=3)
    return Calibration(
        "h", Optics((32, 24), matrix), Optics((32, 24), matrix), np.eye(4), pose, spec
    )


def stacks(names: tuple[str, ...] = ("front", "side")) -> list[PatternStack]:
    calibration, rng = head(), np.random.default_rng(5)
    return [
        PatternStack(
            rng.integers(0, 256, (2, 7, 24, 32), dtype=np.uint8),
            (1.0, 0.35),
            calibration.pattern,
            calibration.digest,
            name,
            {"source": "test"},
        )
        for name in names
    ]


def recorded(folder: Path) -> Path:
    calibration = head()
    replay.write(folder, stacks(), {calibration.digest: calibration})
    return folder


def test_recording_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    recording = replay.read(recorded(tmp_path / "scan"))
    for got, expected in zip(recording.stacks, stacks(), strict=True):
        assert np.array_equal(got.images, expected.images)
        for field in ("exposures", "pattern", "calibration_digest", "name", "meta"):
            assert getattr(got, field) == getattr(expected, field)
    assert set(recording.calibrations) == {head().digest}


def _edit(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.yaml"
        content = yaml.safe_load(path.read_text())
        change(content)
        path.write_text(yaml.safe_dump(content))

    return damage


def _png(image: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        cv2.imwrite(str(folder / "side" / "e1_03.png"), image)
        _edit(lambda m: m["stacks"][1]["images"][10].pop("sha256"))(folder)

    return damage


def _cut(folder: Path) -> None:
    path = folder / "side" / "e1_03.png"
    path.write_bytes(path.read_bytes()[:-40])


def _flip(folder: Path) -> None:
    path = folder / "side" / "e1_03.png"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _flip_unsigned(folder: Path) -> None:
    path = folder / "side" / "e1_03.png"
    path.write_bytes(path.read_bytes()[:60] + path.read_bytes()[-12:])
    _edit(lambda m: m["stacks"][1]["images"][10].pop("sha256"))(folder)


def _enormous(folder: Path) -> None:
    """A PNG of a few bytes that claims 60000 x 60000 pixels."""
    (folder / "side" / "e1_03.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in (
                (b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)),
                (b"IDAT", zlib.compress(bytes(100))),
                (b"IEND", b""),
            )
        )
    )
    _edit(lambda m: m["stacks"][1]["images"][10].pop("sha256"))(folder)


def _folder(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def _recalibrate(folder: Path) -> None:
    moved = replace(head(), pixel_centre=0.5)
    calibration_io.save(moved, folder / "side" / "calibration.yaml")


def _other_pattern(folder: Path) -> None:
    other = replace(head(), pattern=PatternSpec(column_bits=2, steps=3, code_step=2))
    calibration_io.save(other, folder / "side" / "calibration.yaml")
    _edit(lambda m: m["stacks"][1].update(calibration_digest=other.digest))(folder)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "manifest.yaml").unlink(), "no manifest.yaml"),
    (lambda f: (f / "manifest.yaml").write_text("a: ["), r"manifest\.yaml: not YAML"),
    (lambda f: (f / "manifest.yaml").write_text("- 1"), "not a mapping"),
    (lambda f: (f / "manifest.yaml").write_text("[" * 20_000), r"manifest\.yaml: not YAML"),
    (lambda f: (f / "manifest.yaml").write_text("a: 2026-02-31"), r"manifest\.yaml: not YAML"),
    (lambda f: (f / "manifest.yaml").write_bytes(b"\xff"), r"manifest\.yaml: not YAML"),
    (_edit(lambda m: m["stacks"][1].update(meta=5)), r"stacks\[1\]\.meta: expected dict, got 5"),
    (_edit(lambda m: m["stacks"][1].update(calibration="/etc/passwd")), "passwd leaves the folder"),
    (_enormous, r"e1_03\.png: damaged PNG"),
    (_folder("side/e1_03.png"), r"e1_03\.png: cannot be read \(Is a directory"),
    (_folder("side/calibration.yaml"), r"calibration\.yaml: cannot be read \(Is a directory"),
    (_edit(lambda m: m.update(schema=9)), "schema: expected 1, got 9"),
    (_edit(lambda m: m.update(station=9)), "station: unknown key"),
    (_edit(lambda m: m.update(stacks=[])), "stacks: expected a list"),
    (_edit(lambda m: m["stacks"][1].update(gain=1)), r"stacks\[1\]\.gain: unknown key"),
    (_edit(lambda m: m["stacks"][1].pop("exposures")), r"stacks\[1\]\.exposures: expected list"),
    (_edit(lambda m: m["stacks"][0].update(exposures=[1.0, -1])), "finite numbers above 0"),
    (_edit(lambda m: m["stacks"][0].update(exposures=[1.0, float("inf")])), r"got \[1\.0, inf\]"),
    (_edit(lambda m: m["stacks"][0]["images"].pop()), "13 files, expected 7 patterns x 2"),
    (_edit(lambda m: m["stacks"][0]["images"][2].pop("file")), r"images\[2\]\.file: missing"),
    (_edit(lambda m: m["stacks"][0]["images"][2].update(x=1)), r"images\[2\]: unknown key x"),
    (_edit(lambda m: m["stacks"][0]["images"][2].update(file="../a.png")), "leaves the folder"),
    (lambda f: (f / "side" / "e1_03.png").unlink(), r"e1_03\.png: pattern image missing"),
    (lambda f: (f / "side" / "e1_03.png").write_bytes(b"GIF89a"), r"e1_03\.png: not a PNG"),
    (_cut, r"e1_03\.png: truncated PNG"),
    (_flip, r"e1_03\.png: content differs from the sha256"),
    (_flip_unsigned, r"e1_03\.png: damaged PNG"),
    (_png(np.zeros((24, 31), np.uint8)), r"e1_03\.png: pattern image 10 is 31x24.*32x24"),
    (_png(np.zeros((24, 32), np.uint16)), r"e1_03\.png: uint16 image, expected 8 bit"),
    (lambda f: (f / "side" / "calibration.yaml").unlink(), "no such file"),
    (_recalibrate, r"stacks\[1\]\.calibration_digest"),
    (_other_pattern, r"stacks\[1\]\.pattern_digest.*code step 2"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_damage_is_one_error_that_names_the_place(
    damage: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    folder = recorded(tmp_path / "scan")
    damage(folder)
    with pytest.raises(StationError, match=text):
        replay.read(folder)


def test_colour_png_is_read_as_grey(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "scan")
    _png(np.full((24, 32, 3), 77, np.uint8))(folder)
    assert (replay.read(folder).stacks[1].images[1, 3] == 77).all()


def test_images_of_another_tool_are_read_with_a_given_calibration(tmp_path: Path) -> None:
    paths = []
    for k in range(7):
        paths.append(tmp_path / f"{k}.png")
        cv2.imwrite(str(paths[-1]), np.full((24, 32), k, np.uint8))
    stack = replay.read_images(paths, head())
    assert stack.images[0, :, 0, 0].tolist() == list(range(7))
    with pytest.raises(InputError, match="6 files, expected 7 patterns"):
        replay.read_images(paths[:-1], head())


@pytest.mark.parametrize("names", [("a", "a"), ("../a", "b"), ("", "b"), (".hidden", "b")])
def test_names_that_cannot_be_folders_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="plain names"):
        replay.write(tmp_path, stacks(names), {head().digest: head()})


def test_stack_without_its_calibration_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no calibration"):
        replay.write(tmp_path, stacks(), {})


def test_driver_hands_out_scans_in_order_once_or_in_a_loop(tmp_path: Path) -> None:
    for name in ("b", "a"):
        recorded(tmp_path / name)
    (tmp_path / "a" / "front" / "e0_00.png").unlink()
    with closing(replay.ReplayScanner(tmp_path, mode="once")) as scanner:
        assert isinstance(scanner, Scanner)
        with pytest.raises(InputError, match="e0_00"):
            scanner.capture(Trigger("1"))
        assert [s.name for s in scanner.capture(Trigger("2"))] == ["front", "side"]
        assert set(scanner.calibrations) == {head().digest}
        with pytest.raises(CaptureError, match="all 2 recorded scans"):
            scanner.capture(Trigger("3"))
    with pytest.raises(CaptureError, match="closed"):
        scanner.capture(Trigger("4"))
    looping = replay.ReplayScanner(tmp_path / "b")
    assert all(len(looping.capture(Trigger(str(k)))) == 2 for k in range(3))


def test_folder_without_scans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither"):
        replay.ReplayScanner(tmp_path)
