"""How long a scan takes here, from pattern images to separate parts: `forge-station bench --scan`.

Images are simulated first and not timed; no model is needed. Two figures are set against targets,
both for a camera of 1280x960 and 17 patterns: one exposure of one pose to points, and four poses
with two exposures each to parts. Medians; nothing is asserted, because a figure says something of
this machine only, and of what else ran on it (`load`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

import numpy as np

from forge_station.capture import fusion, structured_light
from forge_station.capture.fusion import Fusion
from forge_station.contract.catalogue import by_id
from forge_station.errors import ConfigError
from forge_station.geometry import quality, scene

SIZE = (1280, 960)
POINTS_TARGET_MS, PARTS_TARGET_MS = 150.0, 1500.0
_PARTS = ("hex_nut M8", "flat_washer M8", "hex_bolt M8x30")
_SPACING_MM = 35.0


def run(out: TextIO = sys.stdout, repeats: int = 9, size: tuple[int, int] = SIZE) -> int:
    """Print a table and, as the last line, one JSON object. Raises ConfigError without `demo`."""
    figures = measure(repeats, size)
    print(_text(figures), file=out)
    print(json.dumps(figures), file=out)
    return 0


def measure(repeats: int = 9, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Medians in ms, and their ratios to the targets (which are for SIZE)."""
    stacks, calibrations = _scans(size)
    first = stacks[0]
    single = replace(first, images=first.images[:1], exposures=first.exposures[:1])
    head = calibrations[first.calibration_digest]
    scans = structured_light.decode_all(stacks, calibrations)
    cloud = fusion.fuse(scans)
    found = scene.separate(cloud)
    stages: dict[str, Callable[[], object]] = {
        "points": lambda: structured_light.decode(single, head),
        "decode": lambda: structured_light.decode_all(stacks, calibrations),
        "fuse": lambda: fusion.fuse(scans),
        "scene": lambda: scene.separate(cloud),
        "gate": lambda: quality.gate(cloud, found),
    }
    try:
        fusion.require()
        stages["refine"] = lambda: fusion.fuse(scans, Fusion(refine=True))
    except ConfigError:
        pass  # said in the table
    measured = {name: _median_ms(do, repeats) for name, do in stages.items()}
    taken = {name: wall for name, (wall, _) in measured.items()}
    parts_ms = sum(taken[name] for name in ("decode", "fuse", "scene", "gate"))
    return {
        "image_size": list(size),
        "patterns": first.pattern.image_count,
        "poses": len(stacks),
        "exposures": len(first.exposures),
        "points": len(cloud.points),
        "parts": len(found.parts),
        "repeats": repeats,
        "stages_ms": {name: round(value, 1) for name, value in taken.items()},
        "cpu_ms": {name: round(cpu, 1) for name, (_, cpu) in measured.items()},
        "points_ms": round(taken["points"], 1),
        "points_of_target": round(taken["points"] / POINTS_TARGET_MS, 2),
        "parts_ms": round(parts_ms, 1),
        "parts_of_target": round(parts_ms / PARTS_TARGET_MS, 2),
        "threads": structured_light.THREADS,
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
    }


def _scans(size: tuple[int, int]) -> tuple[list[Any], Mapping[str, Any]]:
    try:
        from forge_station.sim import fasteners, rest_pose, scanner
    except ModuleNotFoundError as error:
        raise ConfigError(
            "bench --scan simulates its images",
            got=error,
            action="install the extra: pip install forge-station[demo]",
        ) from error
    meshes = []
    for number, name in enumerate(_PARTS):
        mesh = fasteners.build(by_id(name), np.random.default_rng(number))
        mesh = rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))
        place = np.array([(number - 1) * _SPACING_MM, 0.0, 0.0])
        meshes.append(mesh.transformed(np.eye(3), place))
    rig = scanner.rig(1.0, image_size=size)
    rng = np.random.default_rng(0)
    stacks = [scanner.simulate(meshes, pose, rng) for pose in rig]
    return stacks, {pose.digest: pose for pose in rig}


def _median_ms(do: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(passed, spent by all threads of this process): where they differ, others had the CPUs."""
    do()
    taken = []
    for _ in range(repeats):
        start, spent = time.perf_counter(), time.process_time()
        do()
        taken.append((time.perf_counter() - start, time.process_time() - spent))
    wall, cpu = 1000 * np.median(taken, axis=0)
    return float(wall), float(cpu)


def _text(figures: Mapping[str, Any]) -> str:
    width, height = figures["image_size"]
    lines = [
        f"{width}x{height}, {figures['patterns']} patterns, {figures['poses']} poses x "
        f"{figures['exposures']} exposures, {figures['points']} points, {figures['parts']} parts; "
        f"median of {figures['repeats']}, load {figures['load']}, {figures['cpus']} CPUs",
        *(
            f"{name:<10}{value:>9.1f} ms, {figures['cpu_ms'][name]:>9.1f} ms of CPU time"
            for name, value in figures["stages_ms"].items()
        ),
        f"one exposure to points: {figures['points_ms']} ms, {figures['points_of_target']} of the "
        f"target {POINTS_TARGET_MS:g} ms",
        f"all poses to parts: {figures['parts_ms']} ms, {figures['parts_of_target']} of the target "
        f"{PARTS_TARGET_MS:g} ms",
    ]
    if "refine" not in figures["stages_ms"]:
        lines.append("refine not measured: it needs the extra `pointcloud`")
    return "\n".join(lines)
