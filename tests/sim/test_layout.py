"""Layouts: no overlap, the promised gaps, the given order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from forge_station.contract.catalogue import CATALOGUE
from forge_station.sim.fasteners import build
from forge_station.sim.layout import lay_out
from forge_station.sim.mesh import Mesh
from forge_station.sim.rest_pose import rest


def parts(count: int, seed: int = 0) -> list[Mesh]:
    rng = np.random.default_rng(seed)
    return [rest(build(CATALOGUE[rng.integers(len(CATALOGUE))]), rng) for _ in range(count)]


@pytest.mark.parametrize("gap", [(-1.0, 2.0), (3.0, 2.0), (float("nan"), 1.0)])
def test_bad_gaps_are_refused(gap: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="gap_mm"):
        lay_out(parts(2), np.random.default_rng(0), gap)


@pytest.mark.parametrize("rows", [0, 3])
def test_bad_rows_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        lay_out(parts(2), np.random.default_rng(0), (1.0, 2.0), rows=rows)


def test_nothing_is_laid_out_as_nothing() -> None:
    assert lay_out([], np.random.default_rng(0), (1.0, 2.0)) == []


def test_a_row_keeps_order_heights_and_gaps_and_is_centred() -> None:
    meshes = parts(5)
    placed = lay_out(meshes, np.random.default_rng(1), (2.0, 4.0), rows=1)
    boxes = [mesh.bounds() for mesh in placed]
    for (_, high), (low, _) in pairwise(boxes):
        assert 2.0 - 1e-9 <= low[0] - high[0] <= 4.0 + 1e-9
    assert [mesh.extents()[2] for mesh in placed] == pytest.approx(
        [mesh.extents()[2] for mesh in meshes]
    )
    assert all(low[2] == pytest.approx(0.0, abs=1e-9) for low, _ in boxes)
    assert boxes[0][0][0] == pytest.approx(-boxes[-1][1][0])


@pytest.mark.parametrize("seed", range(8))
def test_footprints_never_come_closer_than_the_least_gap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placed = lay_out(parts(int(rng.integers(2, 7)), seed), rng, (1.5, 6.0))
    for i, one in enumerate(placed):
        for other in placed[:i]:
            (a, b), (c, d) = one.bounds(), other.bounds()
            assert max(c[0] - b[0], a[0] - d[0], c[1] - b[1], a[1] - d[1]) >= 1.5 - 1e-9


def test_two_rows_are_shorter_than_one() -> None:
    meshes = parts(6)
    spans = [
        np.ptp(
            [m.bounds() for m in lay_out(meshes, np.random.default_rng(2), (2, 2), rows=r)], (0, 1)
        )
        for r in (1, 2)
    ]
    assert spans[1][0] < spans[0][0]
    assert spans[1][1] > spans[0][1]
