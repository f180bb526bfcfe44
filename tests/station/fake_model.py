"""A model that answers from a script, and part clouds to inspect with it.

The class has the part of `VisionLanguageModel`'s interface that the checks use; it looks at no
picture. What it was shown and asked is kept, so that a test can look at that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import CONTRACT_VERSION, tasks
from forge_station.contract.catalogue import by_id
from forge_station.contract.manifest import FileEntry, Manifest
from forge_station.errors import ModelError
from forge_station.geometry.pose import PartCloud, align
from forge_station.sim import fasteners, rest_pose
from forge_station.sim.mesh import sample_surface
from forge_station.vlm.decode import Branch, BranchResult, Limits
from forge_station.vlm.model import Trunk
from forge_station.vlm.soft_grid import SoftRows

PIXEL_MM = 0.15
NORMAL: Mapping[str, float] = {"normal": 0.97}


@dataclass
class FakeModel:
    """`readings`: mark -> (part, probability). `letter`, `missing`, `score`: turn two.

    `surface`: class -> probability, the rest spread over the others; `surface_score` and `rows`
    (row key -> text) belong to it. `fails`: names of methods that raise ModelError. `overruns`:
    branch keys that exceed their budget.
    """

    readings: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    letter: Mapping[str, float] = field(default_factory=lambda: {"none": 0.99})
    missing: Mapping[str, float] = field(default_factory=lambda: {"none": 0.99})
    score: Mapping[str, float] = field(default_factory=lambda: {"10/10": 1.0})
    surface: Mapping[str, float] = field(default_factory=lambda: NORMAL)
    near: Mapping[str, float] = field(default_factory=dict)
    """Class -> probability of the closer look."""
    suspicious: tuple[str, int, int] = ("top", 5, 9)
    """View, row and column of the one suspicious cell."""
    surface_score: Mapping[str, float] = field(default_factory=lambda: {"9/10": 1.0})
    rows: Mapping[str, str] = field(default_factory=dict)
    fails: frozenset[str] = frozenset()
    overruns: frozenset[str] = frozenset()
    provider: str = "script"
    images: list[NDArray[np.uint8]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    closed: int = 0
    warmed: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    nearest: int = 0
    """Length of the trunk of the closer look."""

    manifest = Manifest(
        name="script",
        version="1.0.0",
        release_counter=1,
        contract_version=CONTRACT_VERSION,
        precision="fp32",
        files={"nothing.bin": FileEntry.of(b"")},
    )

    def warm_up(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        self.warmed.append(tuple(sizes))

    def close(self) -> None:
        self.closed += 1

    def trunk(self, images: Sequence[NDArray[np.uint8]], text: str) -> Trunk:
        self._may_fail("trunk")
        self.images += list(images)
        self.texts.append(text)
        return Trunk((), (0,) * (1 + len(self.texts)), 1)

    def soft_rows(self, trunk: Trunk, keys: Sequence[str]) -> SoftRows:
        """One cell stands out; the next trunk is the closer look."""
        self.nearest = trunk.length + 1
        view, row, column = self.suspicious
        cells = np.full((len(keys), 16), 0.01, np.float32)
        cells[list(keys).index(tasks.row_key(view, row)), column] = 0.8
        return SoftRows(cells, cells.max(axis=1))

    def columns_grammar(self) -> Any:
        return "columns"

    def decode_branches(
        self, trunk: Trunk, branches: Sequence[Branch], limits: Limits
    ) -> list[BranchResult]:
        self._may_fail("decode_branches")
        results = []
        for branch in branches:
            self.keys.append(branch.key)
            text, probability = self.rows.get(branch.key, tasks.NONE), 0.9
            over = branch.key in self.overruns
            logprob = math.log(probability)
            results.append(
                BranchResult(
                    branch.key, "" if over else text, (), logprob, logprob, (probability,),
                    () if over else ((text, probability),), None, over,
                )
            )  # fmt: skip
        return results

    def score_lines(
        self,
        trunk: Trunk,
        lines: Mapping[str, Sequence[str]],
        *,
        behind: str = "",
        floor: float = 0.0,
    ) -> dict[str, dict[str, float]]:
        self._may_fail("score_lines")
        self.texts += [behind] if behind else []
        return {key: self._odds(trunk, key, texts) for key, texts in lines.items()}

    def _odds(self, trunk: Trunk, key: str, texts: Sequence[str]) -> dict[str, float]:
        self._may_fail(key)
        self.keys.append(key)
        if key.rstrip(":") in self.readings:
            part, probability = self.readings[key.rstrip(":")]
            if part not in texts:
                raise AssertionError(f"{part} is not an option")
            rest = (1.0 - probability) / (len(texts) - 1)
            return {text: probability if text == part else rest for text in texts}
        pictured = tasks.IMAGE_TOKEN in self.texts[-1]
        script = {
            tasks.ANSWER_KEY: self.letter,
            tasks.MISSING_KEY: self.missing,
            tasks.CLASS_KEY: self.near if trunk.length == self.nearest else self.surface,
            tasks.SCORE_KEY: self.surface_score if pictured else self.score,
        }[key]
        unknown = set(script) - set(texts)
        if unknown:
            raise AssertionError(f"{key} {unknown} is not an option")
        rest = (1.0 - sum(script.values())) / max(1, len(texts) - len(script))
        return {text: script.get(text, rest) for text in texts}

    def _may_fail(self, name: str) -> None:
        if name in self.fails:
            raise ModelError("the model cannot run", which=name)


@lru_cache(maxsize=32)
def part_cloud(part: str, seed: int = 0, count: int = 12_000) -> PartCloud:
    """A catalogue part in its usual pose as four head poses see it: not what faces the tray."""
    rng = np.random.default_rng(seed)
    mesh = fasteners.build(by_id(part), rng)
    mesh = rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))
    points, normals, _ = sample_surface(mesh, count, rng)
    seen = points[normals[:, 2] > -0.2]
    return align(seen + rng.normal(0, 0.1 * PIXEL_MM, seen.shape), PIXEL_MM, poses=4)


def tray_points(clouds: Sequence[PartCloud], gap_mm: float = 10.0) -> NDArray[np.float32]:
    """The parts in a row on a seen tray, as one cloud in the tray frame."""
    placed, x = [], 0.0
    for cloud in clouds:
        length = float(np.ptp(cloud.points[:, 0]))
        placed.append(cloud.points + np.array([x + length / 2, 0, 0], np.float32))
        x += length + gap_mm
    for points in placed:
        points[:, 0] -= (x - gap_mm) / 2
    rng = np.random.default_rng(0)
    half = np.array([(x + 20) / 2, 30.0])
    x_line, y_line = (np.arange(-side, side, PIXEL_MM) for side in half)
    u, v = np.meshgrid(x_line, y_line)
    ground = np.column_stack([u.ravel(), v.ravel(), np.zeros(u.size)])
    ground[:, 2] += rng.normal(0, 0.1 * PIXEL_MM, len(ground))
    return np.concatenate([ground.astype(np.float32), *placed])
