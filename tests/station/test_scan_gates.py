"""Every gate before the model, from camera images to the verdict: UNSURE or ERROR with its reason.

The model of these tests reads every part right, so that a gate that is open would say PASS. Each
case also leaves its picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("numba", reason="scans are simulated with the extra demo")

from forge_station import evidence
from forge_station.capture import structured_light
from forge_station.capture.base import PatternStack
from forge_station.capture.fusion import Fusion
from forge_station.contract.catalogue import by_id
from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome, unknown_reasons
from forge_station.contract.views import NANO_LAYOUT
from forge_station.geometry import quality
from forge_station.permit import CHECKS_ALONE
from forge_station.pipeline import Gates, Inspection, Inspector, Job
from forge_station.sim import fasteners, rest_pose, scanner
from forge_station.sim.mesh import Mesh
from tests.station.fake_model import FakeModel

NUT = "hex_nut M8"
ROW = ((-24.0, 0.0), (0.0, 6.0), (24.0, -4.0))
STEEL = scanner.Surface(specular=0.1)
SIZE = (320, 240)


@lru_cache(maxsize=1)
def nut() -> Mesh:
    mesh = fasteners.build(by_id(NUT), np.random.default_rng(0))
    return rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))


@lru_cache(maxsize=8)
def stacks(
    places: tuple[tuple[float, float], ...] = ROW,
    *,
    black: int | None = None,
    off_mm: float = 0.0,
) -> tuple[PatternStack, ...]:
    """Nuts at (x, y) mm as four poses see them; `black`: number of one that reflects nothing."""
    meshes = [nut().transformed(np.eye(3), np.array([x, y, 0.0])) for x, y in places]
    surfaces = [scanner.Surface(0.0, 0.0, 1.0) if k == black else STEEL for k in range(len(meshes))]
    rng = np.random.default_rng(1)
    return tuple(
        scanner.simulate(
            meshes, pose, rng, exposures=(1.0,), registration=(off_mm, 0.0), surfaces=surfaces
        )
        for pose in rig()
    )


@lru_cache(maxsize=1)
def rig() -> list[scanner.Calibration]:
    return scanner.rig(0.6, image_size=SIZE)


Edit = Callable[[np.ndarray], np.ndarray]


def edited(seen: Sequence[PatternStack], edit: Edit) -> list[PatternStack]:
    return [replace(stack, images=edit(stack.images.copy())) for stack in seen]


def inspect(
    seen: Sequence[PatternStack],
    gates: Gates | None = None,
    how: Fusion | None = None,
    count: int = 3,
) -> Inspection:
    """As if `count` nuts were called for, and the model read a right one at every mark."""
    model = FakeModel(dict.fromkeys("ABCDEF", (NUT, 0.99)))
    product = Product("NUTS", "batch", ("workpiece",), {NUT: count})
    inspector = Inspector(
        model, permit=CHECKS_ALONE, gates=gates or Gates(), fusion=how or Fusion()
    )
    job = Job("result-1", "serial-1", product, station="s1", line="l1")
    return inspector.inspect_stacks(job, seen, {pose.digest: pose for pose in rig()})


def brighter(images: np.ndarray) -> np.ndarray:
    return np.clip(images.astype(np.int32) * 5, 0, 255).astype(np.uint8)


def blurred(images: np.ndarray) -> np.ndarray:
    flat = images.reshape(-1, *images.shape[2:])
    return np.stack([cv2.GaussianBlur(image, (0, 0), 1.3) for image in flat]).reshape(images.shape)


def moved() -> list[PatternStack]:
    """The middle nut was pushed by half a millimetre while the phases were shown."""
    after = stacks((ROW[0], (0.5, 6.0), ROW[2]))
    mixed = []
    for before, now in zip(stacks(), after, strict=True):
        images = before.images.copy()
        images[:, 9:] = now.images[:, 9:]
        mixed.append(replace(before, images=images))
    return mixed


def late(images: np.ndarray) -> np.ndarray:
    return np.roll(images, 2, axis=1)


def strict(**limits: float) -> Gates:
    return Gates(scene=replace(quality.DEFAULT_LIMITS, **limits))


FOCUS = Gates(decoding=structured_light.Limits(blur_px=1.2))
SEVEN = tuple((-30.0 + 20 * (k % 4), -12.0 + 24 * (k // 4)) for k in range(7))
CASES = {
    "SATURATED": (lambda: edited(stacks(), brighter), None, None),
    "TOO_DARK": (lambda: edited(stacks(), lambda images: images // 16), None, None),
    "MOTION": (moved, None, None),
    "OUT_OF_FOCUS": (lambda: edited(stacks(), blurred), FOCUS, None),
    "POSE_MISFIT": (
        lambda: stacks(off_mm=0.3), None, Fusion(refine=True, max_shift_mm=0.02)
    ),
    "UNSEEN_AREA": (lambda: stacks(black=1), None, None),
    "TOO_FEW_POINTS": (stacks, strict(min_part_points=10**7), None),
    "LOW_COVERAGE": (stacks, strict(max_unseen_share=-1.0), None),
    "NO_TRAY": (stacks, strict(min_tray_share=0.999), None),
    "PART_OUT_OF_FIELD": (lambda: stacks((*ROW[:2], (49.0, 0.0))), None, None),
    "TOUCHING_PARTS": (lambda: stacks((ROW[0], (0.0, 0.0), (11.4, 6.6))), None, None),
    "TOO_MANY_PARTS": (lambda: stacks(SEVEN), None, None),
    "EMPTY_SCENE": (lambda: stacks(()), None, None),
    "CAPTURE_FAILED": (lambda: edited(stacks(), late), None, None),
}  # fmt: skip


def test_a_good_scan_of_good_parts_passes() -> None:
    found = inspect(stacks())
    verdict = found.verdict
    assert (verdict.outcome, [r.code for r in verdict.reasons]) == (Outcome.PASS, [])
    figures = verdict.scan.quality
    assert figures["motion_px"] < 0.3
    assert figures["blur_px"] < 1.2
    assert figures["valid_share"] <= figures["decoded_share"] <= 1.0


@pytest.mark.parametrize("code", CASES)
def test_a_bad_scan_never_passes_and_leaves_its_reason_and_picture(
    code: str, tmp_path: Path
) -> None:
    make, gates, how = CASES[code]
    if how is not None and how.refine:
        pytest.importorskip("small_gicp", reason="poses are refined with the extra pointcloud")
    seen = make()
    found = inspect(seen, gates, how)
    if 0 < len(found.parts) <= 6:  # parts that are not seen must not be missed by their number
        found = inspect(seen, gates, how, len(found.parts))
    verdict = found.verdict
    assert verdict.outcome in (Outcome.UNSURE, Outcome.ERROR)
    assert code in [reason.code for reason in verdict.reasons]
    assert not unknown_reasons(verdict.reasons)
    text = next(reason.text for reason in verdict.reasons if reason.code == code)
    assert code == "EMPTY_SCENE" or any(figure.isdigit() for figure in text), text
    stored = evidence.store(tmp_path, found, NANO_LAYOUT)
    assert stored.picture is not None
    assert stored.picture.stat().st_size > 1000


def test_refined_poses_stand_in_the_verdict() -> None:
    pytest.importorskip("small_gicp", reason="poses are refined with the extra pointcloud")
    found = inspect(stacks(off_mm=0.3), None, Fusion(refine=True, max_residual_px=1.0))
    figures = found.verdict.scan.quality
    assert "POSE_MISFIT" not in found.verdict.scan.flags
    assert 0.1 < figures["shift_mm"] < 1.5
    assert figures["residual_mm"] < 0.3
    assert figures["turn_deg"] < 0.3
