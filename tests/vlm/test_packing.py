"""Masks and positions of packed segments."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_station.vlm.packing import MASKED, Contexts, pack


def test_a_segment_sees_the_trunk_and_itself_only():
    packed = pack(Contexts.root(3, 7), [0, 0], [[11, 12], [13]])
    assert packed.ids.tolist() == [11, 12, 13]
    assert packed.positions[:, 0].tolist() == [[7, 8, 7]] * 3
    visible = (packed.bias[0, 0] == 0).astype(int).tolist()
    assert visible == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]
    assert packed.bias[packed.bias != 0].tolist() == [MASKED] * 5
    assert packed.last.tolist() == [1, 2]


def test_the_next_pass_sees_its_own_past_and_not_its_neighbours():
    first = pack(Contexts.root(2, 2), [0, 0], [[5], [6, 7]])
    second = pack(first.contexts, [1, 1, 0], [[8], [9], [10]])
    visible = (second.bias[0, 0] == 0).astype(int).tolist()
    assert visible == [
        [1, 1, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert second.positions[0, 0].tolist() == [4, 4, 3]


def test_inner_parents_make_a_tree_in_one_pass():
    packed = pack(Contexts.root(1, 1), [0] * 4, [[5, 6], [7], [8], [9]], [-1, 0, 0, 2])
    visible = (packed.bias[0, 0] == 0).astype(int).tolist()
    assert visible == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert packed.positions[0, 0].tolist() == [1, 2, 3, 3, 4]
    assert packed.contexts.position.tolist() == [3, 4, 4, 5]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 6)), min_size=1, max_size=7),
)
def test_two_passes_equal_one_pass_with_inner_parents(trunk, items):
    lengths = [length for length, _ in items]
    inner = [min(parent, n - 1) for n, (_, parent) in enumerate(items)]
    segments = [[100 * n + i for i in range(length)] for n, length in enumerate(lengths)]
    packed = pack(Contexts.root(trunk, trunk), [0] * len(segments), segments, inner)

    def path(n: int) -> list[int]:
        return (path(inner[n]) if inner[n] >= 0 else []) + segments[n]

    for n in range(len(segments)):
        row = packed.bias[0, 0, packed.last[n]] == 0
        assert row[:trunk].all()
        assert packed.ids[row[trunk:]].tolist() == path(n)
        assert packed.contexts.position[n] == trunk + len(path(n))
        assert (packed.contexts.visible[n] == row).all()


def test_no_past_at_all_is_allowed():
    packed = pack(Contexts.root(0, 0), [0], [[1, 2]])
    assert (packed.bias[0, 0] == 0).tolist() == [[True, False], [True, True]]
    assert np.asarray(packed.positions).shape == (3, 1, 2)
