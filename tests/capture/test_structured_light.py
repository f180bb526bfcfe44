"""Decoder against scenes whose answer is known in closed form; no simulator involved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture import base, patterns, structured_light
from forge_station.capture.base import PatternStack
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.triangulation import without_flying_points
from forge_station.errors import CalibrationError, CaptureError, StationError

PAIRS = PatternSpec(
    kind="gray_pairs", axis="both", period_px=0.0, steps=0, column_bits=9, row_bits=9, code_step=1
)
PHASE = PatternSpec(column_bits=6)


def head(spec: PatternSpec = PHASE, pixel_centre: float = 0.0, bent: bool = True) -> Calibration:
    """Camera 400 mm above the tray, projector 120 mm to its right, both with distortion."""
    shift = pixel_centre
    camera = Optics(
        (200, 150),
        np.array([[420.0, 0, 99.5 + shift], [0, 420, 74.5 + shift], [0, 0, 1]]),
        np.array([-0.15, 0.1, 1e-3, -1e-3, 0.0]) * bent,
    )
    projector = Optics(
        (500, 400),
        np.array([[900.0, 0, 249.5 + shift], [0, 900, 199.5 + shift], [0, 0, 1]]),
        np.array([-0.1, 0.05, -1e-3, 1e-3, 0.0]) * bent,
    )
    tray_from_camera = np.diag([1.0, -1.0, -1.0, 1.0])
    tray_from_camera[2, 3] = 400.0
    angle = np.arctan2(120, 400)
    projector_from_camera = np.eye(4)
    projector_from_camera[:3, :3] = [
        [np.cos(angle), 0, np.sin(angle)],
        [0, 1, 0],
        [-np.sin(angle), 0, np.cos(angle)],
    ]
    projector_from_camera[:3, 3] = -projector_from_camera[:3, :3] @ [120.0, 0, 0]
    return Calibration(
        "test head", camera, projector, projector_from_camera, tray_from_camera, spec, pixel_centre
    )


def truth(calibration: Calibration, height: Callable[[Any, Any], Any]) -> NDArray[np.float64]:
    """Tray-frame points [H, W, 3] that the camera pixels see on the surface z = height(x, y)."""
    camera, pose = calibration.camera, calibration.tray_from_camera
    assert pose is not None
    u, v = np.meshgrid(np.arange(camera.image_size[0]), np.arange(camera.image_size[1]))
    x, y = camera.undistort(
        (u + calibration.pixel_centre - camera.matrix[0, 2]) / camera.matrix[0, 0],
        (v + calibration.pixel_centre - camera.matrix[1, 2]) / camera.matrix[1, 1],
    )
    ray = np.stack([x, y, np.ones_like(x)], -1) @ pose[:3, :3].T
    depth = np.full(x.shape, 400.0)
    for _ in range(60):
        at = pose[:3, 3] + ray * depth[..., None]
        depth = depth + (at[..., 2] - height(at[..., 0], at[..., 1]))
    return np.asarray(pose[:3, 3] + ray * depth[..., None])


def seen(
    calibration: Calibration,
    height: Callable[[Any, Any], Any] = lambda x, y: 5 + 0.1 * x + 0.05 * y,
) -> tuple[PatternStack, NDArray[np.float64]]:
    """Noise-free images of the surface, by exact projection, and its points."""
    points = truth(calibration, height)
    pose = calibration.tray_from_camera
    assert pose is not None
    in_projector = (
        np.concatenate([points, np.ones((*points.shape[:2], 1))], -1).reshape(-1, 4)
        @ (calibration.projector_from_camera @ np.linalg.inv(pose)).T
    )
    uv = calibration.projector.project(in_projector[:, :3]) - calibration.pixel_centre
    images = []
    for axis, profile in patterns.profiles(calibration.pattern, calibration.projector.image_size):
        where = uv[:, axis]
        if calibration.pattern.kind == "gray_pairs":
            where = np.round(where)
        light = np.interp(where, np.arange(profile.size), profile)
        images.append(np.round(20 + 200 * light).astype(np.uint8).reshape(points.shape[:2]))
    stack = PatternStack(
        np.stack(images)[None], (1.0,), calibration.pattern, calibration.digest, "test"
    )
    return stack, points


@pytest.mark.parametrize("pixel_centre", [0.0, 0.5])
@pytest.mark.parametrize("bent", [False, True])
def test_phase_code_recovers_a_tilted_plane_through_both_lenses(
    pixel_centre: float, bent: bool
) -> None:
    calibration = head(pixel_centre=pixel_centre, bent=bent)
    stack, points = seen(calibration)
    scan = structured_light.decode(stack, calibration)
    error = np.linalg.norm(scan.points - points, axis=-1)[2:-2, 2:-2]
    assert np.isfinite(error).mean() > 0.99
    assert np.nanpercentile(error, 99) < 0.05
    assert abs(np.nanmean((scan.points - points)[..., 2])) < 0.002
    assert scan.frame == "tray"
    assert scan.quality.flags == ()
    assert scan.camera_pixel_mm == pytest.approx(400 / 420)


def test_two_axis_code_recovers_the_plane_and_reports_its_reprojection_error() -> None:
    calibration = head(PAIRS)
    stack, points = seen(calibration)
    scan = structured_light.decode(stack, calibration)
    error = (scan.points - points)[..., 2]
    assert np.isfinite(error).mean() > 0.98
    assert np.nanstd(error) < 0.75  # one projector pixel is 1.6 mm of depth here
    assert scan.quality.reprojection_px is not None
    assert scan.quality.reprojection_px < 0.3


def test_without_tray_the_scan_stays_in_the_camera_frame() -> None:
    with_tray = head()
    stack, points = seen(with_tray)
    calibration = replace(with_tray, tray_from_camera=None)
    stack = replace(stack, calibration_digest=calibration.digest)
    scan = structured_light.decode(stack, calibration)
    assert scan.frame == "camera"
    assert np.nanmedian(scan.points[..., 2]) == pytest.approx(
        400 - np.median(points[..., 2]), abs=0.1
    )


def test_step_edges_keep_both_surfaces_and_nothing_in_between() -> None:
    calibration = head()
    stack, _ = seen(calibration, lambda x, y: np.where(np.abs(x) < 30, 20.0, 0.0))
    scan = structured_light.decode(stack, calibration)
    z = scan.points[..., 2][np.isfinite(scan.points[..., 2])]
    assert ((np.abs(z) < 0.3) | (np.abs(z - 20) < 0.3)).mean() > 0.995
    assert (np.abs(z - 20) < 0.3).sum() > 3000


def test_a_pixel_hanging_between_two_surfaces_is_removed() -> None:
    calibration = head()
    depth = np.full((150, 200), 400.0, np.float32)
    depth[:, 100:] = 380
    depth[:, 99] = 390  # mixed pixels along the edge
    depth[40, 40] = 300  # a lone point
    solid = without_flying_points(depth, calibration, jump=2.7, support_limit=5)
    assert not solid[5:-5, 99].any()
    assert not solid[40, 40]
    assert solid[5:-5, 98].all()
    assert solid[5:-5, 100].all()


def test_saturated_pixels_come_from_the_shorter_exposure_in_any_order() -> None:
    calibration = head()
    stack, points = seen(calibration)
    bright = stack.images.astype(np.int32) * 3
    images = np.concatenate([np.minimum(bright, 255).astype(np.uint8), stack.images])
    for order in ([0, 1], [1, 0]):
        both = replace(
            stack, images=images[order], exposures=tuple(np.array([1.0, 1 / 3])[order].tolist())
        )
        scan = structured_light.decode(both, calibration)
        assert scan.quality.valid_share > 0.99
        assert np.nanmax(np.abs(scan.points - points)[..., 2]) < 0.2
    alone = replace(stack, images=images[:1])
    assert base.SATURATED in structured_light.decode(alone, calibration).quality.flags


def test_exposure_times_in_another_order_than_their_images_are_refused() -> None:
    calibration = head()
    stack, _ = seen(calibration)
    for times in (1, 3):  # unsaturated, and with the long exposure at the end of its range
        bright = np.minimum(stack.images.astype(np.int32) * times, 255).astype(np.uint8)
        images = np.concatenate([bright, bright // 3])
        both = replace(stack, images=images, exposures=(1.0, 1 / 3))
        structured_light.decode(both, calibration)
        with pytest.raises(CaptureError, match=r"exposures 1 and 0.*brighter at 1 than at 0\.33"):
            structured_light.decode(replace(both, exposures=(1 / 3, 1.0)), calibration)


@pytest.mark.parametrize(
    ("damage", "flags"),
    [
        (lambda im: np.zeros_like(im), {base.NO_DATA, base.TOO_DARK, base.LOW_COVERAGE}),
        (lambda im: np.full_like(im, 7), {base.NO_DATA, base.TOO_DARK, base.LOW_COVERAGE}),
        (lambda im: np.full_like(im, 255), {base.NO_DATA, base.SATURATED, base.LOW_COVERAGE}),
        (lambda im: im // 40, {base.NO_DATA, base.TOO_DARK, base.LOW_COVERAGE}),
        (lambda im: im[:, [0, 1, 3, 2, *range(4, 16)]], {base.INCONSISTENT_CODE}),
    ],
)
def test_bad_light_or_order_is_flagged_and_gives_no_wrong_points(
    damage: Callable[[Any], Any], flags: set[str]
) -> None:
    calibration = head()
    stack, _ = seen(calibration)
    scan = structured_light.decode(replace(stack, images=damage(stack.images)), calibration)
    assert flags <= set(scan.quality.flags)
    if base.NO_DATA in flags:
        assert np.isnan(scan.points).all()
        assert base.fuse([scan]).points.shape == (0, 3)


def _other_step(stack: PatternStack) -> PatternStack:
    return replace(stack, pattern=replace(stack.pattern, code_step=2))


def _repeated(stack: PatternStack) -> PatternStack:
    images = stack.images.copy()
    images[0, 9] = images[0, 8]
    return replace(stack, images=images)


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (lambda s: replace(s, images=s.images[:, :-1]), CaptureError, "15 pattern images"),
        (lambda s: replace(s, images=s.images[:, :, :-1]), CaptureError, "200x149.*200x150"),
        (lambda s: replace(s, images=s.images[0]), CaptureError, r"uint8 \[E, N, H, W\]"),
        (lambda s: replace(s, images=s.images.astype(np.uint16)), CaptureError, "uint16"),
        (lambda s: replace(s, exposures=(1.0, 0.3)), CaptureError, "2 exposure times"),
        (lambda s: replace(s, exposures=(0.0,)), CaptureError, "finite numbers above 0.*got 0"),
        (lambda s: replace(s, exposures=(-1.0,)), CaptureError, "got -1"),
        (lambda s: replace(s, exposures=(float("nan"),)), CaptureError, "got nan"),
        (lambda s: replace(s, exposures=(float("inf"),)), CaptureError, "got inf"),
        (lambda s: replace(s, calibration_digest="0" * 64), CalibrationError, "000000000000"),
        (lambda s: replace(s, calibration_digest=""), CalibrationError, r"\(none\)"),
        (_other_step, CalibrationError, "code_step: stack 2, calibration 1"),
        (_repeated, CaptureError, "images 8 and 9 of exposure 0 are identical"),
    ],
)
def test_stack_that_does_not_fit_is_refused_by_name(
    damage: Callable[[PatternStack], PatternStack], kind: type[StationError], text: str
) -> None:
    calibration = head()
    stack, _ = seen(calibration)
    with pytest.raises(kind, match=text) as error:
        structured_light.decode(damage(stack), calibration)
    assert "test" in str(error.value)


def test_wrong_code_step_says_which_one_fits() -> None:
    made_with = head(replace(PAIRS, code_step=2, column_bits=8, row_bits=8))
    stack, _ = seen(made_with)
    assert structured_light.decode(stack, made_with).quality.valid_share > 0.9
    wrong_spec = replace(made_with.pattern, code_step=1)
    wrong = replace(
        made_with, pattern=wrong_spec, projector=replace(made_with.projector, image_size=(250, 200))
    )
    stack = replace(stack, pattern=wrong_spec, calibration_digest=wrong.digest)
    with pytest.raises(CalibrationError, match="code_step 2 gives"):
        structured_light.decode(stack, wrong)


def test_phase_images_in_the_wrong_order_are_noticed() -> None:
    calibration = head()
    stack, _ = seen(calibration)
    swapped = stack.images[:, [*range(8), 9, 8, *range(10, 16)]]
    scan = structured_light.decode(replace(stack, images=swapped), calibration)
    assert base.INCONSISTENT_CODE in scan.quality.flags


def test_column_code_with_the_wrong_step_is_refused_by_the_tray() -> None:
    stack, _ = seen(head())
    spec = replace(PHASE, code_step=2)
    wrong = head(spec)
    stack = replace(stack, pattern=spec, calibration_digest=wrong.digest)
    with pytest.raises(CalibrationError, match=r"from the tray plane.*code step \(2\)"):
        structured_light.decode(stack, wrong)


def test_swapped_transform_direction_is_refused() -> None:
    above = np.eye(4)
    above[1, 3] = -150.0  # a projector that is not level with the camera
    right = head(PAIRS)
    right = replace(right, projector_from_camera=right.projector_from_camera @ above)
    right = replace(
        right,
        projector=replace(
            right.projector, matrix=np.array([[900.0, 0, 249.5], [0, 900, 530], [0, 0, 1]])
        ),
    )
    stack, _ = seen(right)
    wrong = replace(
        right, projector_from_camera=np.asarray(np.linalg.inv(right.projector_from_camera))
    )
    with pytest.raises(CalibrationError, match="transform direction"):
        structured_light.decode(replace(stack, calibration_digest=wrong.digest), wrong)


def test_decode_all_names_the_missing_calibration() -> None:
    calibration = head()
    stack, _ = seen(calibration)
    assert len(structured_light.decode_all([stack], {calibration.digest: calibration})) == 1
    with pytest.raises(CalibrationError, match=calibration.digest[:12]):
        structured_light.decode_all([stack], {})


def test_too_few_bits_for_the_projector_are_refused() -> None:
    with pytest.raises(CalibrationError, match="5 bits x 8 px reach 256 px, projector has 500"):
        patterns.images(PatternSpec(column_bits=5), (500, 400))


def test_patterns_change_one_gray_bit_at_a_time_and_pairs_are_inverse() -> None:
    images = patterns.images(PHASE, (500, 20))
    assert images.shape == (16, 20, 500)
    bits = images[2:8, 0, 4::8] > 127
    assert (np.diff(bits.astype(int), axis=1) != 0).sum(axis=0).max() == 1
    pairs = patterns.images(PAIRS, (500, 400))
    assert pairs.shape == (38, 400, 500)
    assert (pairs[0:36:2] == 255 - pairs[1:36:2]).all()
    assert (pairs[-2] == 255).all()
    assert (pairs[-1] == 0).all()


COLUMNS = replace(PAIRS, axis="column", row_bits=0)


@pytest.mark.parametrize(
    "spec",
    [
        replace(PHASE, white_last=True),
        replace(PHASE, steps=4),
        replace(PHASE, period_px=20.0, column_bits=6),
        replace(PHASE, code_step=2, column_bits=5),
        COLUMNS,
        replace(COLUMNS, code_step=2, column_bits=8, white_last=True),
        replace(PAIRS, white_last=True),
    ],
)
def test_every_code_that_can_be_shown_can_be_decoded(spec: PatternSpec) -> None:
    calibration = head(spec)
    stack, points = seen(calibration)
    assert stack.images.shape[1] == spec.image_count
    scan = structured_light.decode(stack, calibration)
    error = (scan.points - points)[..., 2]
    assert np.isfinite(error).mean() > 0.97
    # A projector pixel is 1.6 mm of depth here: whole codes, and pattern pixels of two, are steps.
    whole = spec.kind == "gray_pairs" or spec.code_step > 1
    coarse = 1.2 * spec.code_step if whole else 0.05
    assert np.nanpercentile(np.abs(error - np.nanmedian(error)), 95) < coarse
    assert scan.quality.flags == ()


def test_the_result_does_not_depend_on_threads_and_hardly_on_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibration = head()
    stack, _ = seen(calibration, lambda x, y: np.where(np.abs(x) < 30, 20.0, 0.0))
    whole = structured_light.decode(stack, calibration, threads=1)
    monkeypatch.setattr(structured_light, "_STRIP_PIXELS", 8 * 200)
    one, two = (structured_light.decode(stack, calibration, threads=n) for n in (1, 2))
    assert np.array_equal(one.points, two.points, equal_nan=True)
    assert one.quality == two.quality
    # Each strip iterates the projector's lens until it is good enough.
    np.testing.assert_allclose(one.points, whole.points, atol=0.01)
    code = structured_light.read_code(stack)
    assert np.array_equal(code.white, whole.intensity)


def textured(images: NDArray[np.uint8], late_from: int, shift: int) -> NDArray[np.uint8]:
    """Images of a surface with blots that move by `shift` pixels before image `late_from`."""
    rng = np.random.default_rng(3)
    blots = np.kron(rng.uniform(0.4, 1.0, (15, 20)), np.ones((10, 10)))
    shade = np.stack([blots] * images.shape[1])
    shade[late_from:] = np.roll(blots, shift, axis=1)
    noise = rng.normal(0, 1.0, images.shape)
    return np.clip(np.round(images * shade + noise), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("spec", [PHASE, replace(PHASE, white_last=True), PAIRS, COLUMNS])
def test_motion_between_the_first_and_the_last_image_is_noticed(spec: PatternSpec) -> None:
    calibration = head(spec)
    stack, _ = seen(calibration)
    found = {}
    for shift in (0, 1, 3):
        images = textured(stack.images, spec.image_count - 8, shift)
        quality = structured_light.decode(replace(stack, images=images), calibration).quality
        assert quality.motion_px is not None
        found[shift] = quality.motion_px
        assert (base.MOTION in quality.flags) == (shift > 0)
    assert found[0] < 0.3
    assert found[1] > 0.7


def test_motion_between_two_exposures_is_noticed_and_their_brightness_is_not_motion() -> None:
    calibration = head()
    stack, _ = seen(calibration)
    for shift in (0, 1):
        long = textured(stack.images, 0, 0)
        short = (textured(stack.images, 0, shift) * 0.35).astype(np.uint8)
        both = replace(stack, images=np.concatenate([long, short]), exposures=(1.0, 0.35))
        quality = structured_light.decode(both, calibration).quality
        assert quality.motion_px is not None
        assert (base.MOTION in quality.flags) == (shift > 0), quality.motion_px


def test_blur_is_measured_in_camera_pixels() -> None:
    calibration = head(PatternSpec(period_px=32.0, column_bits=5))
    stack, _ = seen(calibration)
    measured = []
    for sigma in (0.0, 1.0, 1.6):
        images = [cv2.GaussianBlur(i, (0, 0), sigma) if sigma else i for i in stack.images[0]]
        blurred = replace(stack, images=np.stack(images)[None])
        quality = structured_light.decode(blurred, calibration).quality
        assert quality.blur_px is not None
        measured.append(quality.blur_px)
    assert measured[0] < 0.5
    assert measured[1] == pytest.approx(1.0, abs=0.3)
    assert measured[2] == pytest.approx(1.6, abs=0.4)
    strict = structured_light.Limits(blur_px=1.2)
    flags = structured_light.decode(blurred, calibration, strict).quality.flags
    assert base.OUT_OF_FOCUS in flags


@pytest.mark.parametrize("spec", [PHASE, PAIRS])
@pytest.mark.parametrize("late", [1, 5])
def test_a_sequence_that_began_late_is_refused_with_its_delay(spec: PatternSpec, late: int) -> None:
    calibration = head(spec)
    stack, _ = seen(calibration)
    rolled = replace(stack, images=np.roll(stack.images, late, axis=1))
    with pytest.raises(CaptureError, match=f"{late} images late"):
        structured_light.decode(rolled, calibration)


def test_a_short_exposure_that_began_late_is_refused_too() -> None:
    calibration = head()
    stack, _ = seen(calibration)
    short = np.roll(stack.images // 6, 2, axis=1)
    images = np.concatenate([stack.images, short])
    assert 12 < np.ptp(short, axis=1).max() < 40  # as dark as a shortest exposure is
    both = replace(stack, images=images, exposures=(1.0, 1 / 6))
    with pytest.raises(CaptureError, match=r"exposure 1.*2 images late"):
        structured_light.decode(both, calibration)
    both = replace(both, images=np.concatenate([stack.images, stack.images // 6]))
    assert structured_light.decode(both, calibration).quality.valid_share > 0.99
