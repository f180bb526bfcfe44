"""What does not fit on the disk is refused, and what was there before is still whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from forge_station.capture import calibration_io, files, replay, session
from forge_station.capture.base import Frame
from forge_station.errors import InputError
from tests.capture.test_structured_light import head, seen


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: to who writes, the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def frame(number: int) -> Frame:
    return Frame(np.full((4, 4), number, np.uint8), number, source="test")


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    files.write(path, b"first")
    with room_for(1000), pytest.raises(InputError, match=r"cannot be written .*file"):
        files.write(path, bytes(2000))
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        files.write(path / "below a file", b"")


def test_a_picture_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    for name in ("picture", "picture.nothing"):
        with pytest.raises(InputError, match=r"expected \.png or \.jpg"):
            files.write_picture(tmp_path / name, np.zeros((4, 4), np.uint8))
    assert not list(tmp_path.iterdir())


def test_a_calibration_survives_a_full_disk(tmp_path: Path) -> None:
    path, calibration = tmp_path / "head.yaml", head()
    calibration_io.save(calibration, path)
    with room_for(100), pytest.raises(InputError, match=r"head\.yaml"):
        calibration_io.save(calibration, path)
    assert calibration_io.load(path).digest == calibration.digest


def test_a_scan_that_does_not_fit_is_no_recording(tmp_path: Path) -> None:
    calibration = head()
    stack, _ = seen(calibration)
    with room_for(4000), pytest.raises(InputError, match="cannot be written"):
        replay.write(tmp_path / "scan", [stack], {calibration.digest: calibration})
    with pytest.raises(InputError, match="no manifest"):
        replay.read(tmp_path / "scan")


def test_a_session_keeps_the_frames_that_were_written(tmp_path: Path) -> None:
    with closing(session.Recorder(tmp_path / "session")) as recorder:
        for number in range(4):
            recorder.write(frame(number))
        size = (tmp_path / "session" / session.MANIFEST).stat().st_size
        with room_for(size + 20), pytest.raises(InputError, match=r"manifest\.yaml"):
            recorder.write(frame(4))
        assert len(session.read(tmp_path / "session")) == 4
        recorder.write(frame(4))  # there is room again
    entries = session.read(tmp_path / "session")
    assert [entry.sequence for entry in entries] == list(range(5))
    assert session.load(entries[-1]).tolist() == [[4] * 4] * 4
