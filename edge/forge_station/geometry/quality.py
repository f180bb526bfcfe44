"""Gates before the model: is this scan, and is each part in it, good enough to be judged?

It does not know models or lines. A problem ends in UNSURE or ERROR, never in PASS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_station.capture import base
from forge_station.capture.base import Cloud, ScanQuality
from forge_station.geometry import gauge
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.geometry.scene import Scene


@dataclass(frozen=True)
class Limits:
    """What a scan must reach. Shares are 0..1; pixels are camera pixels on the part."""

    min_part_points: int = 400
    min_part_width_px: float = 10.0
    max_unseen_share: float = 0.35
    min_tray_share: float = 0.05
    max_reprojection_px: float = 2.0


DEFAULT_LIMITS = Limits()


def gate(cloud: Cloud, scene: Scene, limits: Limits = DEFAULT_LIMITS) -> tuple[Problem, ...]:
    """Every problem of a scan: of the decoding, of the scene, of each part; worst level first."""
    problems = [
        *_scan_problems(cloud.quality, len(cloud.points), limits),
        *scene.problems,
        *_tray_problems(scene, limits),
        *_part_problems(scene.parts, limits),
    ]
    by_code: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        by_code.setdefault((problem.code, problem.text), problem)
    found = list(by_code.values())
    if any(problem.code == base.NO_DATA for problem in found):
        # Without data everything else is a consequence.
        said = next(problem for problem in found if problem.code == base.NO_DATA)
        found = [p for p in found if p is said or p.code not in (base.NO_DATA, "EMPTY_SCENE")]
    return tuple(sorted(found, key=lambda problem: problem.level != "ERROR"))


def _scan_problems(quality: ScanQuality, points: int, limits: Limits) -> list[Problem]:
    problems = []
    if points == 0 or base.NO_DATA in quality.flags:
        text = (
            f"the scan gave {points} points ({quality.valid_share:.0%} of the image); check "
            "projector, exposure and that the head looks at the tray"
        )
        problems.append(Problem(base.NO_DATA, text, "ERROR"))
    if base.TOO_DARK in quality.flags:
        text = (
            f"{quality.dark_share:.0%} of the image got too little projected light; raise the "
            "exposure or check the projector"
        )
        problems.append(Problem(base.TOO_DARK, text, "ERROR" if points == 0 else "UNSURE"))
    if base.SATURATED in quality.flags:
        text = (
            f"{quality.saturated_share:.1%} of the image is overexposed in every exposure; add a "
            "shorter exposure, or dull the shine"
        )
        problems.append(Problem(base.SATURATED, text, "UNSURE"))
    if base.INCONSISTENT_CODE in quality.flags:
        text = (
            f"in {quality.inconsistent_share:.1%} of the image the patterns contradict each "
            "other; the tray moved during the scan, or frames were mixed up: scan again"
        )
        problems.append(Problem(base.INCONSISTENT_CODE, text, "UNSURE"))
    if base.LOW_COVERAGE in quality.flags:
        text = (
            f"only {quality.valid_share:.0%} of the image could be measured; check exposure, "
            "projector focus and that the head looks at the tray"
        )
        problems.append(Problem(base.LOW_COVERAGE, text, "UNSURE"))
    if base.MOTION in quality.flags:
        text = (
            f"something moved by about {quality.motion_px or 0:.1f} camera pixels while the "
            "patterns were shown; let the part come to rest, damp vibrations: scan again"
        )
        problems.append(Problem(base.MOTION, text, "UNSURE"))
    if base.OUT_OF_FOCUS in quality.flags:
        text = (
            f"edges of the patterns are blurred over {quality.blur_px or 0:.1f} camera pixels; "
            "focus camera and projector on the tray, and clean their windows"
        )
        problems.append(Problem(base.OUT_OF_FOCUS, text, "UNSURE"))
    problems += [
        Problem(
            base.POSE_MISFIT,
            f"{text}; the poses were used as they are known: fix part and tray, calibrate again",
            "UNSURE",
        )
        for text in quality.misfits
    ]
    reprojection = quality.reprojection_px
    if reprojection is not None and reprojection > limits.max_reprojection_px:
        text = (
            f"camera and projector disagree by {reprojection:.1f} px (limit "
            f"{limits.max_reprojection_px:.1f} px); the head was moved or the calibration belongs "
            "to another one: calibrate again"
        )
        problems.append(Problem("CALIBRATION_MISMATCH", text, "ERROR"))
    return problems


def _tray_problems(scene: Scene, limits: Limits) -> list[Problem]:
    share = scene.tray_share
    if share is None or not scene.parts or share >= limits.min_tray_share:
        return []
    text = (
        f"only {share:.1%} of the points lie on the tray (limit {limits.min_tray_share:.0%}), so "
        "that nothing shows whether the calibration still holds; uncover the tray"
    )
    return [Problem("NO_TRAY", text, "UNSURE")]


def _part_problems(parts: Sequence[PartCloud], limits: Limits) -> list[Problem]:
    problems = []
    for index, part in enumerate(parts):
        where = part.place(index)
        if len(part.points) < limits.min_part_points:
            text = (
                f"{where} has {len(part.points)} points, at least {limits.min_part_points} are "
                "needed; bring the head closer, or clean the part if it is oily or black"
            )
            problems.append(Problem("TOO_FEW_POINTS", text, "UNSURE", index))
            continue
        size = gauge.measure(part)
        across = size.width_mm / part.camera_pixel_mm
        if across < limits.min_part_width_px:
            text = (
                f"{where} is {across:.0f} camera pixels wide, at least "
                f"{limits.min_part_width_px:.0f} are needed to read it; bring the head closer"
            )
            problems.append(Problem("TOO_FEW_POINTS", text, "UNSURE", index))
        if part.unseen_share > limits.max_unseen_share:
            text = (
                f"{part.unseen_share:.0%} of the outline of {where} was not seen (limit "
                f"{limits.max_unseen_share:.0%}); add a head pose or an exposure"
            )
            problems.append(Problem("LOW_COVERAGE", text, "UNSURE", index))
        if part.has_waist and not _is_one_part(size):
            text = (
                f"{where} looks like two parts in touch and has the size of no part of the "
                "catalogue; leave a gap of at least a fifth of the tallest part"
            )
            problems.append(Problem("TOUCHING_PARTS", text, "UNSURE", index))
    return problems


def _is_one_part(size: gauge.Size) -> bool:
    """A waist is no proof: wing nuts have two. A box that fits a model speaks for one part."""
    return min(gauge.misfits(size).values()) <= 1.0
