"""A head pairs frames, patterns and parts, or refuses; whatever the line and the camera do.

FORGE_STATION_PARTS=10000 makes the overrun tests long (about a minute a case).
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture import calibration_io, patterns, replay, structured_light
from forge_station.capture.base import Frame, PatternStack, Scanner, Trigger, white_and_black
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.head import Head, HeadScanner, open_heads
from forge_station.capture.lifecycle import State
from forge_station.capture.projector import ProjectorInfo, ProjectorSettings, Stepping
from forge_station.capture.settings import HeadSettings
from forge_station.capture.supervisor import Change, SupervisedCamera
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
    CameraTimeoutError,
    CaptureError,
    ContractError,
    ProjectorLostError,
    ProjectorNotFoundError,
)

PARTS = int(os.environ.get("FORGE_STATION_PARTS", "300"))
EXPOSURES = (200.0, 70.0)
WIDTH, HEIGHT = 16, 12
SPEC = PatternSpec(column_bits=2, steps=3)


def calibration(width: int = WIDTH, height: int = HEIGHT, spec: PatternSpec = SPEC) -> Calibration:
    matrix = np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]])
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = 300.0
    eye, light = Optics((width, height), matrix), Optics((32, 24), matrix)
    return Calibration("h", eye, light, np.eye(4), pose, spec)


class Rig:
    """A camera and a projector on one simulated line, with faults put in at random.

    Each image carries in its pixels which part it shows and which pattern: the truth that what the
    head returns is held against. share: of the bursts that something happens to.
    """

    def __init__(self, stepping: Stepping = "host", share: float = 0.0, seed: int = 1) -> None:
        self.stepping, self.share = stepping, share
        self.rng = np.random.default_rng(seed)
        self.part = 1
        self.shown = 0
        self.queue: deque[Frame] = deque()
        self.late: list[tuple[int, int, int]] = []
        self.number = 0
        self.mode: TriggerMode | None = None
        self.exposure_us = 0.0
        self.now_ns = 10**12
        self.faults: dict[int, str] = {}
        self.planned: dict[int, str] = {}
        self.injected = 0
        self.images = 0
        self.closed = 0
        self.bursts: list[tuple[TriggerMode, int | None, float | None]] = []

    # -- the projector

    def prepare(self, images: NDArray[np.uint8]) -> None:
        self.images = len(images)

    def show(self, index: int) -> None:
        self.shown = index
        if self.stepping == "projector":
            for shown in range(self.images):
                self.now_ns += 10**7
                self.pulse(shown)

    # -- the camera

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        self.mode, self.exposure_us = trigger, exposure_us or 0.0
        self.bursts.append((trigger, count, exposure_us))
        self.queue.clear()
        self.faults = dict(self.planned)
        self.answers = 0
        self.now_ns += 10**9
        if self.rng.random() < 0.5:  # was on its way when the camera was armed, or still is
            self.deliver_late()
        if self.share and self.rng.random() < self.share:
            self.injected += 1
            kinds = ["lost", "twice", "incomplete", "late"]
            kinds += [] if trigger == "free" else ["gone", "extra"]  # there are no pulses then
            for _ in range(int(self.rng.integers(1, 3))):
                where = int(self.rng.integers(0, self.images))
                self.faults[where] = kinds[int(self.rng.integers(len(kinds)))]
        if trigger == "free":
            for shown in range(count or 0):
                self.pulse(shown)

    def trigger(self) -> None:
        self.pulse(self.shown)

    def pulse(self, shown: int) -> None:
        """One pulse on the line, or one software trigger."""
        self.deliver_late()
        fault = self.faults.get(self.answers)
        self.answers += 1
        if fault == "gone":  # the camera did not see the pulse
            return
        if fault == "late":  # it comes when the next burst is armed
            self.late.append((self.part, shown, self.now_ns))
            return
        if fault == "extra":  # the sensor of the next part, while this one is scanned
            self.deliver(self.part + 1, shown, taken_ns=self.now_ns - 4 * 10**6)
        if fault == "lost":
            self.number += 1
            return
        self.deliver(self.part, shown, complete=fault != "incomplete")
        if fault == "twice":
            self.queue.append(self.queue[-1])

    def deliver_late(self) -> None:
        for part, shown, taken_ns in self.late:
            self.deliver(part, shown, taken_ns=taken_ns)
        self.late = []

    def deliver(
        self, part: int, shown: int, *, complete: bool = True, taken_ns: int | None = None
    ) -> None:
        level = {0: 200, 1: 10}.get(shown, 100)
        image = self.rng.integers(level, level + 5, (HEIGHT, WIDTH), np.uint8)
        image[0, :3] = part % 256, part // 256, shown
        self.number += 1
        self.queue.append(
            Frame(
                image, self.number, complete,
                t_monotonic_ns=self.now_ns + int(1e3 * self.exposure_us), t_utc_ns=10**18,
                t_device_ns=(taken_ns or self.now_ns) + 12345, exposure_us=self.exposure_us,
                source="rig",
            )
        )  # fmt: skip

    def grab(self, timeout_s: float) -> Frame:
        if not self.queue:
            raise CameraTimeoutError("no frame", which="rig")
        frame = self.queue.popleft()
        self.now_ns = max(self.now_ns, frame.t_monotonic_ns)  # it was waited for
        return frame

    def disarm(self) -> None:
        self.mode = None

    def health(self) -> CameraHealth:
        return CameraHealth()

    def close(self) -> None:
        self.closed += 1


class Eye(Rig):
    def describe(self) -> CameraInfo:
        return CameraInfo(
            "rig", "1", "", "", "", "", WIDTH, HEIGHT, ("free", "software", "hardware")
        )


class Light:
    """The projector's side of a rig."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.prepare, self.show, self.close = rig.prepare, rig.show, rig.close

    def describe(self) -> ProjectorInfo:
        return ProjectorInfo("rig", "", (32, 24), self.rig.stepping)


def head_of(rig: Eye) -> Head:
    return Head("front", rig, Light(rig), calibration(), EXPOSURES, now_ns=lambda: rig.now_ns)


def wrongly_paired(stack: PatternStack, part: int) -> bool:
    marks = stack.images[:, :, 0, :3].astype(int)
    of_part = (marks[..., 0] + 256 * marks[..., 1] == part).all()
    return not (of_part and (marks[..., 2] == np.arange(SPEC.image_count)).all())


@pytest.mark.parametrize("stepping", ["host", "camera", "projector"])
@pytest.mark.timeout(1200)
def test_with_faults_on_every_third_burst_no_part_is_paired_wrongly(stepping: Stepping) -> None:
    rig = Eye(stepping, share=0.3)
    scanner = HeadScanner([head_of(rig)])
    outcomes = {"good": 0, "refused": 0}
    for part in range(1, PARTS + 1):
        rig.part = part
        try:
            (stack,) = scanner.capture(Trigger(str(part)))
        except CaptureError:
            outcomes["refused"] += 1
            continue
        outcomes["good"] += 1
        assert stack.images.shape == (2, SPEC.image_count, HEIGHT, WIDTH)
        assert stack.meta["serial"] == str(part)
        assert not wrongly_paired(stack, part), f"part {part}"
    print(f"{stepping}: {PARTS} parts, {rig.injected} bursts disturbed, {outcomes}")
    assert rig.injected > PARTS / 3
    assert outcomes["good"] > PARTS / 3 and outcomes["refused"] > 0


def test_a_rig_without_faults_gives_every_part_at_the_first_try() -> None:
    rig = Eye()
    with closing(HeadScanner([head_of(rig)])) as scanner:
        assert isinstance(scanner, Scanner)
        for part in range(5):
            rig.part = part
            (stack,) = scanner.capture(Trigger(str(part), "NUTS"))
            assert not wrongly_paired(stack, part)
        assert len(rig.bursts) == 2 * 5
        assert rig.bursts[:2] == [("software", 7, 200.0), ("software", 7, 70.0)]
        assert stack.exposures == (1.0, 0.35) and stack.name == "front"
        assert stack.meta["frames"] == "57-63,64-70" and stack.meta["part_number"] == "NUTS"
        assert stack.calibration_digest in scanner.calibrations
    assert rig.closed == 2


def test_of_several_heads_only_one_shines_at_a_time() -> None:
    lit: list[tuple[int, int]] = []

    class Seen(Eye):
        def trigger(self) -> None:
            lit.append((rigs[0].shown, rigs[1].shown))
            super().trigger()

    rigs = [Seen(), Seen()]
    for rig in rigs:
        rig.shown = 1
    stacks = HeadScanner([head_of(rig) for rig in rigs]).capture(Trigger("1"))
    assert len(stacks) == 2 and len(lit) == 2 * 2 * SPEC.image_count
    assert all(1 in pair for pair in lit), "the other one shows black"


@pytest.mark.parametrize(
    ("stepping", "armed"),
    [("host", ("software", 7)), ("camera", ("free", 7)), ("projector", ("hardware", 8))],
)
def test_who_steps_the_projector_decides_the_cameras_trigger(
    stepping: Stepping, armed: tuple[TriggerMode, int]
) -> None:
    rig = Eye(stepping)
    head_of(rig).scan(Trigger("1"))
    assert rig.bursts[0][:2] == armed


class Script(Eye):
    """A rig whose first burst has one fault, or every one; `more`: further ones."""

    def __init__(
        self, fault: str, *, stepping: Stepping = "host", every: bool = False, image: int = 3
    ) -> None:
        super().__init__(stepping)
        self.script, self.every, self.image = fault, every, image
        self.more: dict[int, str] = {}

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        first = not self.bursts
        self.planned = {self.image: self.script, **self.more} if self.every or first else {}
        super().arm(trigger, count, exposure_us=exposure_us)


FAULTS: list[tuple[Stepping, str, str]] = [
    ("host", "lost", "no frame"),
    ("host", "gone", "no frame"),
    ("host", "twice", "older than its trigger"),
    ("host", "incomplete", "parts missing"),
    ("host", "extra", "older than its trigger"),
    ("projector", "lost", "frame lost or repeated"),
    ("projector", "gone", "no frame"),
    ("projector", "twice", "frame lost or repeated"),
    ("projector", "incomplete", "parts missing"),
    ("projector", "extra", "a frame too many"),
    ("camera", "lost", "frame lost or repeated"),
]


@pytest.mark.parametrize(("stepping", "fault", "message"), FAULTS)
def test_a_disturbed_scan_is_taken_again_once_and_then_refused(
    stepping: Stepping, fault: str, message: str
) -> None:
    once = Script(fault, stepping=stepping)
    assert not wrongly_paired(head_of(once).scan(Trigger("1")), 1)
    assert len(once.bursts) == 3, "the whole scan again: two exposures after the broken burst"
    again = Script(fault, stepping=stepping, every=True)
    with pytest.raises(CaptureError, match=message):
        head_of(again).scan(Trigger("1"))
    assert len(again.bursts) == 2
    assert again.mode is None, "disarmed after the fault"


def test_a_foreign_pulse_that_makes_up_for_a_lost_one_shows_in_the_rhythm() -> None:
    rig = Script("extra", stepping="projector", every=True)
    rig.more = {5: "gone"}
    with pytest.raises(CaptureError, match=r"at another time.*expected 10\.0 ms"):
        head_of(rig).scan(Trigger("1"))


def test_an_image_that_was_late_and_a_trigger_that_got_lost_do_not_make_a_whole_burst() -> None:
    """As many frames as asked for, numbered without gap, all shifted by one."""
    for seed in range(8):  # it comes before or after the camera is armed
        for image in (0, 6):
            rig = Script("gone", every=True, image=image)
            rig.rng = np.random.default_rng(seed)
            rig.late = [(1, 3, rig.now_ns)]
            with pytest.raises(CaptureError):
                head_of(rig).scan(Trigger("1"))


def test_frames_older_than_their_trigger_and_repeated_images_are_refused() -> None:
    class Old(Eye):
        def grab(self, timeout_s: float) -> Frame:
            frame = super().grab(timeout_s)
            return replace(frame, t_monotonic_ns=frame.t_monotonic_ns - 10**9)

    with pytest.raises(CaptureError, match=r"older than its trigger.*image 0"):
        head_of(Old()).scan(Trigger("1"))

    class Frozen(Eye):
        def grab(self, timeout_s: float) -> Frame:
            frame = super().grab(timeout_s)
            return replace(frame, image=np.full_like(frame.image, 9))

    with pytest.raises(CaptureError, match="the image before came once more"):
        head_of(Frozen()).scan(Trigger("1"))


def test_a_dark_projector_and_a_wrong_exposure_are_named() -> None:
    class Dark(Eye):
        def pulse(self, shown: int) -> None:
            super().pulse(max(shown, 2))

    with pytest.raises(CaptureError, match="not brighter"):
        head_of(Dark()).scan(Trigger("1"))

    class Slow(Eye):
        def grab(self, timeout_s: float) -> Frame:
            return replace(super().grab(timeout_s), exposure_us=900.0)

    slow = Slow()
    with pytest.raises(CameraSettingsError, match=r"expected 200 us, got 900 us"):
        head_of(slow).scan(Trigger("1"))
    assert len(slow.bursts) == 1, "the same again would not help"


def test_a_lost_projector_is_opened_anew() -> None:
    rig, opened = Eye(), []

    class Torn(Light):
        def __init__(self, rig: Rig) -> None:
            super().__init__(rig)
            self.show = self.tear

        def tear(self, index: int) -> None:
            if index == 4:
                raise ProjectorLostError("the window was closed")
            self.rig.show(index)

    def reopen() -> Light:
        opened.append(Light(rig))
        return opened[-1]

    torn = Torn(rig)
    head = Head(
        "front", rig, torn, calibration(), EXPOSURES, reopen=reopen, now_ns=lambda: rig.now_ns
    )
    assert not wrongly_paired(head.scan(Trigger("1")), 1)
    assert len(opened) == 1 and head.projector is opened[0] and rig.closed == 1
    head = Head("front", rig, torn, calibration(), EXPOSURES, now_ns=lambda: rig.now_ns)
    with pytest.raises(ProjectorLostError):
        head.scan(Trigger("2"))


def test_the_white_and_black_image_of_each_code() -> None:
    for spec in (SPEC, PatternSpec("gray_pairs", "both", column_bits=5, row_bits=5)):
        shown = patterns.images(spec, (32, 24))
        white, black = white_and_black(spec)
        assert (shown[white] == 255).all() and (shown[black] == 0).all()


@pytest.mark.parametrize("gap_s", [1, 60, 3600, 8 * 3600])
def test_after_any_gap_the_next_part_gets_its_own_frames(gap_s: int) -> None:
    now = [1_700_000_000 * 10**9]
    rig = Eye()
    scanner = HeadScanner([head_of(rig)], utc_ns=lambda: now[0])
    for part in range(3):
        rig.part = part
        (stack,) = scanner.capture(Trigger(str(part), t_utc_ns=now[0] - 10**8))
        assert not wrongly_paired(stack, part) and stack.meta["serial"] == str(part)
        now[0] += gap_s * 10**9


def test_a_stale_trigger_is_refused_before_anything_is_projected() -> None:
    now = 1_700_000_000 * 10**9
    rig = Eye()
    scanner = HeadScanner([head_of(rig)], trigger_age_s=2, utc_ns=lambda: now)
    for age_s in (2.5, -2.5):
        with pytest.raises(CaptureError, match=r"stale.*2 s old at most"):
            scanner.capture(Trigger("7", t_utc_ns=now - int(age_s * 1e9)))
    assert not rig.bursts
    scanner.capture(Trigger("7", t_utc_ns=now - 10**9))


# -- the real thing: a supervised camera in its own process


@pytest.fixture
def scan_folder(tmp_path: Path) -> Path:
    """A recorded scan: what the patterns look like on a flat white board."""
    shown = patterns.images(SPEC, (32, 24))
    found = np.stack([cv2.resize(image, (WIDTH, HEIGHT)) for image in shown])
    noise = np.random.default_rng(1).integers(0, 3, found.shape, np.uint8)
    images = (found // 2 + noise).astype(np.uint8)
    known = calibration()
    stack = PatternStack(images[None], (1.0,), SPEC, known.digest, "front")
    replay.write(tmp_path / "scan", [stack], {known.digest: known})
    return tmp_path / "scan"


def settings(folder: Path, **options: str | int | float | bool) -> HeadSettings:
    return HeadSettings(
        "front",
        CameraSettings("replay", str(folder), open_timeout_s=60, options=options),
        ProjectorSettings("sim", settle_frames=0),
        folder / "front" / "calibration.yaml",
        exposures_us=(5000.0,),
        frame_timeout_s=30.0,
        recover_s=60.0,
    )


def test_a_recorded_scan_through_process_camera_and_head_is_the_recording(
    scan_folder: Path,
) -> None:
    changes: list[Change] = []
    with closing(open_heads([settings(scan_folder)], on_change=changes.append)) as scanner:
        recorded = replay.read(scan_folder).stacks[0]
        for serial in ("1", "2"):
            (stack,) = scanner.capture(Trigger(serial))
            assert np.array_equal(stack.images, recorded.images)
            assert stack.calibration_digest == recorded.calibration_digest
    assert [change.state for change in changes][-1] is State.CLOSED


def test_a_camera_lost_in_the_middle_of_a_scan_costs_no_part_when_it_comes_back(
    scan_folder: Path,
) -> None:
    changes: list[Change] = []
    head = settings(scan_folder, disconnect_after=10)
    with closing(open_heads([head], on_change=changes.append)) as scanner:
        recorded = replay.read(scan_folder).stacks[0]
        for serial in ("1", "2"):  # 7 frames a part: the second is hit, and taken again
            (stack,) = scanner.capture(Trigger(serial))
            assert np.array_equal(stack.images, recorded.images)
    lost = [change for change in changes if change.state is State.STALLED]
    assert len(lost) == 1 and isinstance(lost[0].fault, CameraLostError) and lost[0].lost
    assert lost[0].camera == "front"


def test_a_camera_whose_process_is_killed_in_the_middle_of_a_scan_costs_no_part(
    scan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_heads([settings(scan_folder)])) as scanner:
        eye, light = scanner.heads[0].camera, scanner.heads[0].projector
        assert isinstance(eye, SupervisedCamera)
        eye.wait_open(60, patient=True)
        victim, show = eye.pid, light.show
        assert victim is not None

        def kill_at_the_fourth(index: int) -> None:
            show(index)
            if index == 3 and eye.pid == victim:
                os.kill(victim, signal.SIGKILL)

        monkeypatch.setattr(light, "show", kill_at_the_fourth)
        (stack,) = scanner.capture(Trigger("1"))
        assert np.array_equal(stack.images, replay.read(scan_folder).stacks[0].images)
        assert eye.pid != victim and eye.counters.reconnects == 1


def test_a_camera_that_stays_away_makes_parts_errors_with_the_reason(
    scan_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "unplugged").touch()
    head = replace(settings(scan_folder, unplug_file=str(tmp_path / "unplugged")), recover_s=0.0)
    with closing(open_heads([head])) as scanner, pytest.raises(CaptureError):
        scanner.capture(Trigger("1"))


def test_what_waiting_cannot_mend_is_refused_at_the_start(scan_folder: Path) -> None:
    good = settings(scan_folder)
    with pytest.raises(CameraNotFoundError, match=r"front: laser.*replay"):
        open_heads([replace(good, camera=CameraSettings("laser"))])
    with pytest.raises(ProjectorNotFoundError, match=r"front: torch.*sim"):
        open_heads([replace(good, projector=ProjectorSettings("torch"))])
    with pytest.raises(CaptureError):
        open_heads([replace(good, calibration=scan_folder / "none.yaml")])
    with pytest.raises(CaptureError, match="at least one"):
        open_heads([])
    for exposures in ((), (0.0,), (70.0, 200.0), (70.0, 70.0), (float("nan"),)):
        with pytest.raises(ContractError, match="exposures_us"):
            replace(good, exposures_us=exposures)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadScanner]:
    """Simulated tray, camera and projector, wired through files as with real devices."""
    pytest.importorskip("numba", reason="the simulated camera needs the extra demo")
    from forge_station.sim import scanner

    folder = tmp_path_factory.mktemp("head")
    pose = scanner.rig(0.4, "overhead", (320, 240))[0]
    calibration_io.save(pose, folder / "head.yaml")
    options = {"calibration": str(folder / "head.yaml"), "part": "hex_nut M8", "count": 2}
    eye = CameraSettings("sim", str(folder / "shown"), open_timeout_s=110, options=options)
    light = ProjectorSettings("sim", str(folder / "shown"), settle_frames=0)
    head = HeadSettings(
        "front", eye, light, folder / "head.yaml", (20000.0, 7000.0), recover_s=60.0,
        frame_timeout_s=30.0,
    )  # fmt: skip
    with closing(open_heads([head])) as found:
        yield found


@pytest.mark.timeout(400)  # it may compile the simulator first
def test_a_simulated_head_measures_nuts(simulated: HeadScanner) -> None:
    (stack,) = simulated.capture(Trigger("1"))
    (pose,) = simulated.calibrations.values()
    scan = structured_light.decode(stack, pose)
    height = scan.points[..., 2][np.isfinite(scan.points[..., 2])]
    assert scan.quality.valid_share > 0.7
    assert abs(np.median(height)) < 0.1, "the tray"
    top = height[height > 3.4]
    assert len(top) > 500 and abs(np.percentile(top, 50) - 6.8) < 0.3, "an M8 nut is 6.8 mm high"
