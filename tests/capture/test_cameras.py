"""The drivers of this package that need no SDK: the suite, and what each adds to it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from forge_station.capture import session
from forge_station.capture.base import Frame
from forge_station.capture.camera import Camera, CameraSettings, drivers, open_camera
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
    CameraTimeoutError,
    InputError,
)
from tests.capture.conformance import CameraConformance

WIDTH, HEIGHT = 32, 24


def images(count: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (HEIGHT, WIDTH), np.uint8) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images of noise, without manifest."""
    place = tmp_path / "images"
    place.mkdir()
    for k, image in enumerate(images()):
        cv2.imwrite(str(place / f"{k:02d}.png"), image)
    return place


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """A video file of 20 frames, each one grey level."""
    path = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 50, (64, 48))
    for k in range(20):
        writer.write(np.full((48, 64, 3), 10 * k, np.uint8))
    writer.release()
    return path


class TestReplay(CameraConformance):
    @pytest.fixture
    def settings(self, folder: Path, tmp_path: Path) -> CameraSettings:
        return CameraSettings(
            "replay", str(folder), fps=100, options={"pulse_file": str(tmp_path / "line")}
        )

    @pytest.fixture
    def pulse(self, tmp_path: Path) -> Callable[[], None]:
        def give() -> None:
            with (tmp_path / "line").open("ab") as line:
                line.write(b".")

        return give


class TestSim(CameraConformance):
    absent = None

    @pytest.fixture
    def settings(self) -> CameraSettings:
        pytest.importorskip("numba", reason="the simulated camera needs the extra demo")
        return CameraSettings("sim", fps=100, exposure_us=4000, options={"count": 1})


class TestOpenCv(CameraConformance):
    numbered = False

    @pytest.fixture
    def settings(self, film: Path) -> CameraSettings:
        return CameraSettings("opencv", str(film), options={"loop": True})


def replay(folder: Path, **options: str | int | float | bool) -> CameraSettings:
    return CameraSettings("replay", str(folder), fps=200, options=options)


def test_the_drivers_of_the_package_are_installed() -> None:
    assert {"opencv", "replay", "sim"} <= set(drivers())
    with pytest.raises(CameraNotFoundError, match=r"teleview.*replay"):
        open_camera(CameraSettings("teleview"))


def test_a_session_is_replayed_bit_for_bit_with_what_the_device_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    taken = [
        Frame(
            rng.integers(0, 65536, (HEIGHT, WIDTH, *colour), np.uint16).astype(dtype),
            sequence=100 + 2 * k, complete=k != 1, t_monotonic_ns=10**9 * k, t_utc_ns=5 * 10**9 + k,
            t_device_ns=7 * k, clock="device", exposure_us=1500.0, gain=3.0, pixel_format=name,
            source="arv:1",
        )
        for k, (colour, dtype, name) in enumerate(
            [((), np.uint8, "Mono8"), ((), np.uint16, "Mono12"), ((3,), np.uint8, "RGB8")]
        )
    ]  # fmt: skip
    recorder = session.Recorder(tmp_path / "session")
    for frame in taken:
        recorder.write(frame)
    recorder.close()
    with closing(open_camera(replay(tmp_path / "session", mode="once"))) as camera:
        camera.arm("software")
        for frame in taken:
            camera.trigger()
            got = camera.grab(1)
            assert np.array_equal(got.image, frame.image) and got.image.dtype == frame.image.dtype
            for name in ("complete", "t_utc_ns", "t_device_ns", "exposure_us", "gain"):
                assert getattr(got, name) == getattr(frame, name), name
            assert got.sequence == frame.sequence and got.pixel_format == frame.pixel_format
        camera.trigger()
        with pytest.raises(CameraLostError, match="recording is over"):
            camera.grab(1)
    with pytest.raises(InputError, match="a recording already"):
        session.Recorder(tmp_path / "session")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1", "no frames"),
        ("schema: 2\nframes: []", "not a manifest of this kind"),
        ("schema: 1\nframes: []\nx: 1", "not a manifest of this kind"),
        ("[1", "not a readable manifest"),
        ("schema: 1\nframes: [3]", r"frames\[0\]"),
        ("schema: 1\nframes: [{file: a.png, gamma: 1}]", r"unknown key .*frames\[0\]\.gamma"),
        ("schema: 1\nframes: [{file: a.png, gain: x}]", r"wrong type .*frames\[0\]\.gain"),
        ("schema: 1\nframes: [{sequence: 1}]", r"frames\[0\]\.file"),
        ("schema: 1\nframes: [{file: ../a.png}]", r"frames\[0\]\.file"),
        ("schema: 1\nframes: [{file: a.png, clock: sun}]", r"frames\[0\]\.clock"),
        ("schema: 1\nframes: [{file: gone.png}]", r"gone\.png"),
    ],
)
def test_a_wrong_manifest_is_one_clear_error(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.yaml").write_text(text)
    with pytest.raises(CameraNotFoundError, match=message):
        open_camera(replay(folder))


@given(st.binary(max_size=300), st.sampled_from([b"", b"schema: 1\nframes:\n- "]))
@fuzz(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_manifest_and_no_image_ends_in_a_traceback(
    tmp_path: Path, content: bytes, begin: bytes
) -> None:
    (tmp_path / "manifest.yaml").write_bytes(begin + content)
    (tmp_path / "a.png").write_bytes(content)
    with contextlib.suppress(InputError):
        session.read(tmp_path)
    with contextlib.suppress(InputError):
        session.load(session.Entry(tmp_path / "a.png", 0))


@given(st.dictionaries(st.sampled_from([*session.FIELDS, "x"]), st.integers() | st.text()))
@fuzz(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_entry_of_a_manifest_is_read_or_refused(
    tmp_path: Path, entry: dict[str, object]
) -> None:
    (tmp_path / "manifest.yaml").write_text(f"schema: 1\nframes:\n- {json.dumps(entry)}\n")
    with contextlib.suppress(InputError):
        (found,) = session.read(tmp_path)
        session.load(found)


def test_a_damaged_or_changed_image_ends_the_replay(folder: Path, tmp_path: Path) -> None:
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:60])
    with closing(open_camera(replay(folder))) as camera:
        camera.arm("free")
        for _ in range(3):
            camera.grab(1)
        with pytest.raises(CameraLostError, match=r"damaged image .*03\.png"):
            camera.grab(1)
    recorder = session.Recorder(tmp_path / "session")
    path = recorder.write(Frame(images()[0], 0))
    recorder.close()
    cv2.imwrite(str(path), images()[1])
    with pytest.raises(CameraNotFoundError, match="differs from the sha256"):
        open_camera(replay(path.parent))


def test_injected_faults_show_as_those_of_a_device(folder: Path) -> None:
    with closing(open_camera(replay(folder, drop_every=3, incomplete_every=5))) as camera:
        camera.arm("free")
        frames = [camera.grab(1) for _ in range(6)]
        assert [frame.sequence for frame in frames] == [0, 1, 3, 4, 6, 7]
        assert [frame.complete for frame in frames] == [True, True, True, False, True, True]
        health = camera.health()
        assert (health.frames, health.incomplete, health.dropped) == (6, 1, 2)
    with closing(open_camera(replay(folder, freeze_after=2, disconnect_after=5))) as camera:
        camera.arm("free")
        digests = [camera.grab(1).sha256 for _ in range(5)]
        assert len(set(digests)) == 2 and len(set(digests[1:])) == 1
        with pytest.raises(CameraLostError, match="injected"):
            camera.grab(1)
    with closing(open_camera(replay(folder, delay_every=2, delay_s=0.3))) as camera:
        camera.arm("free")
        camera.grab(1)
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.1)
        assert camera.grab(1).sequence == 1


def test_an_unplugged_replay_is_gone_until_it_is_opened_anew(folder: Path, tmp_path: Path) -> None:
    plug = tmp_path / "unplugged"
    settings = replay(folder, unplug_file=str(plug))
    with closing(open_camera(settings)) as camera:
        camera.arm("free")
        camera.grab(1)
        plug.touch()
        for call in (lambda: camera.grab(1), camera.health, lambda: camera.arm("free")):
            with pytest.raises(CameraLostError, match="unplugged"):
                call()
        with pytest.raises(CameraNotFoundError, match="unplugged"):
            open_camera(settings)


def test_realtime_replay_keeps_the_rhythm_of_the_recording(tmp_path: Path) -> None:
    recorder = session.Recorder(tmp_path / "session")
    for k, at_s in enumerate((0.0, 0.2, 0.22)):
        recorder.write(Frame(images()[k], k, t_monotonic_ns=int(1e9 * at_s)))
    recorder.close()
    with closing(open_camera(replay(tmp_path / "session", mode="realtime"))) as camera:
        camera.arm("free")
        arrived = [camera.grab(2).t_monotonic_ns / 1e9 for _ in range(3)]
    assert arrived[1] - arrived[0] > 0.15  # not at the 200 frames a second of `fps`


@pytest.mark.parametrize(
    "settings",
    [
        CameraSettings("replay", "X", options={"mode": "backwards"}),
        CameraSettings("replay", "X", options={"drop_every": "3"}),
        CameraSettings("replay", "X", options={"drop_every": -3}),
        CameraSettings("replay", "X", options={"live": 1}),
        CameraSettings("replay", "X", fps=0),
        CameraSettings("replay", "X", gain=1),
        CameraSettings("opencv", "X", pixel_format="Bayer"),
        CameraSettings("opencv", "X", exposure_us=100),
        CameraSettings("opencv", "X", options={"backend": "quicktime"}),
        CameraSettings("sim", options={"part": "hex_nut M7777"}),
        CameraSettings("sim", options={"count": 7}),
        CameraSettings("sim", options={"calibration": "/nowhere.yaml"}),
    ],
)
def test_wrong_settings_are_refused_when_opening(settings: CameraSettings, film: Path) -> None:
    if settings.driver == "sim":
        pytest.importorskip("numba", reason="the simulated camera needs the extra demo")
    address = str(film if settings.driver == "opencv" else film.parent)
    settings = CameraSettings(
        settings.driver, address, settings.exposure_us, settings.gain, settings.pixel_format,
        settings.fps, options=settings.options,
    )  # fmt: skip
    with pytest.raises(CameraSettingsError):
        open_camera(settings)


def test_a_video_file_ends_or_begins_again(film: Path) -> None:
    settings = CameraSettings("opencv", str(film), pixel_format="Mono8")
    with closing(open_camera(settings)) as camera:
        camera.arm("software")
        levels = []
        for _ in range(20):
            camera.trigger()
            frame = camera.grab(1)
            assert frame.image.ndim == 2
            levels.append(int(frame.image.mean()))
        assert np.abs(np.array(levels) - 10 * np.arange(20)).max() <= 2
        camera.trigger()
        with pytest.raises(CameraLostError, match="file has ended"):
            camera.grab(1)
        with pytest.raises(CameraLostError, match="file has ended"):
            camera.health()


class Stream:
    """An HTTP camera (MJPEG) that can be told to stall."""

    def __init__(self) -> None:
        stream = self
        self.stalled, self.closing = threading.Event(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=f")
                self.end_headers()
                level = 0
                try:
                    while not stream.closing.is_set():
                        if not stream.stalled.is_set():
                            level = (level + 10) % 250
                            image = np.full((48, 64, 3), level, np.uint8)
                            data = cv2.imencode(".jpg", image)[1].tobytes()
                            head = f"--f\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}"
                            self.wfile.write(f"{head}\r\n\r\n".encode() + data + b"\r\n")
                        time.sleep(0.02)
                except OSError:
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/video.mjpg"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def stream() -> Iterator[Stream]:
    with closing(Stream()) as found:
        yield found


def drain(camera: Camera) -> None:
    """What was buffered may still come."""
    while True:
        camera.grab(1)


def test_a_network_stream_that_stalls_is_lost_in_time_and_stays_lost(stream: Stream) -> None:
    settings = CameraSettings(
        "opencv", stream.address, open_timeout_s=2, options={"read_timeout_s": 0.5}
    )
    with closing(open_camera(settings)) as camera:
        assert camera.describe().clock == "host"
        camera.arm("free")
        assert camera.grab(2).image.shape == (48, 64, 3)
        stream.stalled.set()
        begin = time.monotonic()
        with pytest.raises(CameraLostError):
            drain(camera)
        assert time.monotonic() - begin < 5
        stream.stalled.clear()
        with pytest.raises(CameraLostError):
            camera.grab(1)
    with closing(open_camera(settings)) as anew:
        anew.arm("software")
        anew.trigger()
        anew.grab(2)
