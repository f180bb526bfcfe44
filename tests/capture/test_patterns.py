"""Pattern images: the shortest sequence that reaches, files, and the command that writes them."""

from __future__ import annotations

import argparse
import json

import cv2
import numpy as np
import pytest

from forge_station.capture import calibration_io, patterns
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.errors import CalibrationError, ConfigError, InputError


@pytest.mark.parametrize(
    ("code", "size", "options", "images", "bits"),
    [
        ("phase", (912, 570), {}, 17, (7, 0)),
        ("phase", (912, 570), {"steps": 4}, 13, (7, 0)),
        ("phase", (1920, 1080), {"period_px": 32.0}, 17, (7, 0)),
        ("phase", (912, 570), {"code_step": 2}, 16, (6, 0)),
        ("columns", (1024, 768), {}, 22, (10, 0)),
        ("columns+rows", (1024, 768), {}, 42, (10, 10)),
        ("columns+rows", (1025, 768), {"code_step": 2}, 40, (10, 9)),
        ("phase", (8, 8), {}, 11, (1, 0)),
    ],
)
def test_the_shortest_sequence_reaches_over_the_projector(code, size, options, images, bits):
    spec = patterns.spec_for(code, size, **options)
    assert (spec.image_count, (spec.column_bits, spec.row_bits)) == (images, bits)
    assert (
        patterns.images(spec, (size[0], 2 if code != "columns+rows" else size[1])).shape[0]
        == images
    )


@pytest.mark.parametrize("options", [{"steps": 2}, {"period_px": 3.0}, {"code_step": 0}])
def test_a_code_that_cannot_be_decoded_is_refused(options):
    with pytest.raises(CalibrationError, match="must be at least"):
        patterns.spec_for("phase", (912, 570), **options)


def test_every_column_has_its_own_code():
    """Also the last ones, and in both codes: no two columns look alike in all images."""
    for code in ("phase", "columns"):
        spec = patterns.spec_for(code, (500, 20))
        columns = patterns.images(spec, (500, 20))[:, 0, :]
        assert len(np.unique(columns, axis=1).T) == 500


def test_white_is_shown_once_more_at_the_end_where_asked():
    spec = PatternSpec(column_bits=2, steps=3, white_last=True)
    shown = patterns.images(spec, (32, 24))
    assert len(shown) == spec.image_count == 8
    assert (shown[-1] == shown[0]).all()
    assert spec.digest != PatternSpec(column_bits=2, steps=3).digest


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    patterns.add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    return args.run(args)


def test_the_command_writes_the_patterns_and_says_what_to_put_in_the_station_file(tmp_path, capsys):
    out = tmp_path / "patterns"
    assert command("--projector", "64x16", "--out", out) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    spec = patterns.spec_for("phase", (64, 16))
    files = sorted(out.iterdir())
    assert [file.name for file in files][:2] == ["pattern_00.png", "pattern_01.png"]
    read = np.stack([cv2.imread(str(file), cv2.IMREAD_UNCHANGED) for file in files])
    assert np.array_equal(read, patterns.images(spec, (64, 16)))
    assert told == {
        "width": 64, "height": 16, "patterns": len(files), "sha256": patterns.digest(read)
    }  # fmt: skip
    with pytest.raises(InputError, match="not empty"):
        command("--projector", "64x16", "--out", out)


def test_the_command_takes_the_patterns_of_a_calibration(tmp_path, capsys):
    matrix = np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]])
    optics = Optics((32, 24), matrix)
    spec = PatternSpec(column_bits=2, steps=3, white_last=True)
    head = Calibration("h", optics, optics, np.eye(4), None, spec)
    calibration_io.save(head, tmp_path / "head.yaml")
    assert calibration_io.load(tmp_path / "head.yaml").pattern == spec
    command("--calibration", tmp_path / "head.yaml", "--out", tmp_path / "out")
    assert json.loads(capsys.readouterr().out)["patterns"] == 8


@pytest.mark.parametrize("size", ["912", "912x", "0x5", "9e2x5", "99999x9"])
def test_a_size_that_is_none_is_named(size, tmp_path):
    with pytest.raises(ConfigError, match="size of the projector"):
        command("--projector", size, "--out", tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        command("--projector", "64x16", "--out", tmp_path / "file" / "out")
