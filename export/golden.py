"""The golden set of a bundle, from cases: what the finished bundle says of a few scans.

A station judges them on its own device before the bundle may judge parts (`forge_station.golden`).
Scans are thinned, so that a set is a few megabytes; what is expected is what the bundle says of the
thinned scan. It imports nothing of training: both know the line format of cases.jsonl.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge_station import golden
from forge_station.capture.base import Cloud
from forge_station.contract import record
from forge_station.contract.error import StationError
from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome
from forge_station.errors import InputError
from forge_station.geometry import cloud_io
from forge_station.opening import open_inspector
from forge_station.pipeline import Job

MOST_POINTS = 150_000


def write(folder: Path, cases: Path, count: int) -> golden.Golden:
    """Write golden.json and golden.npz into a finished bundle folder. Raises StationError.

    Cases are taken in turn over products and expected outcomes; those without a scan of the whole
    tray or a product, and those that end in ERROR, are passed over.
    """
    inspector = open_inspector(folder, checks_alone=True)
    with inspector.model:
        scans: list[tuple[str, Product, Cloud]] = []
        for name, product, path in _in_turn(cases):
            cloud = thinned(cloud_io.read_cloud(path, frame="tray"))
            job = Job(result_id=name, serial=name, product=product)
            if inspector.inspect_cloud(job, cloud).verdict.outcome is not Outcome.ERROR:
                scans.append((name, product, cloud))
            if len(scans) == count:
                break
        if not scans:
            raise InputError(
                "no case for the golden set",
                which=cases,
                expected="cases with input.scene and product that do not end in ERROR",
                action="make them: python -m training.cases --out DIR",
            )
        return golden.write(folder, inspector, scans)


def thinned(cloud: Cloud, most: int = MOST_POINTS) -> Cloud:
    """Every n-th point, as of a coarser camera."""
    step = -(-len(cloud.points) // most)
    pixel = cloud.camera_pixel_mm * math.sqrt(step)
    return replace(cloud, points=cloud.points[::step], intensity=None, camera_pixel_mm=pixel)


def _in_turn(folder: Path) -> Iterator[tuple[str, Product, Path]]:
    """Cases round robin over (product, true outcome), so that a short set has some of each."""
    groups: dict[tuple[str, str], list[tuple[str, Product, Path]]] = {}
    for number, line in enumerate(_lines(folder / "cases.jsonl"), 1):
        where = f"{folder / 'cases.jsonl'}, line {number}"
        try:
            case: dict[str, Any] = json.loads(line)
            scene, product = case["input"].get("scene"), case.get("product")
            if not scene or not product:
                continue
            found = record.read(Product, product, "product")
            key = (found.part_number, str(case.get("truth", {}).get("outcome")))
            groups.setdefault(key, []).append((str(case["id"]), found, folder / str(scene)))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, StationError):
                raise
            raise InputError("not a case", which=where, got=error) from error
    while groups:
        for key in list(groups):
            yield groups[key].pop(0)
            if not groups[key]:
                del groups[key]


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise InputError("cases cannot be read", which=path, got=error.strerror) from error
