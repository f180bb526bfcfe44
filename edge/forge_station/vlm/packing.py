"""Many short continuations of one prefix in one sequence: masks and positions, numpy only.

Segments are runs of tokens. Each continues a context (a place in what was already fed, with the
columns it may see) or an earlier segment of the same pack. Positions restart behind the context,
so a segment reads as if it stood alone. It knows nothing of sessions and grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MASKED = np.float32(-1e9)


@dataclass(frozen=True)
class Contexts:
    """Places to continue from. `visible` bool [C, P]: past columns each may see. `position` [C]."""

    visible: NDArray[np.bool_]
    position: NDArray[np.int64]

    @staticmethod
    def root(length: int, position: int) -> Contexts:
        """The single context at the end of a trunk of `length` tokens."""
        return Contexts(np.ones((1, length), np.bool_), np.array([position], np.int64))


@dataclass(frozen=True)
class Pack:
    """Inputs of one forward pass over S packed tokens behind P past ones.

    `ids` int64 [S]; `positions` int64 [3, 1, S]; `bias` float32 [1, 1, S, P + S]; `last` int64
    [segments]: index of the last token of each segment; `contexts`: the ends of the segments.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bias: NDArray[np.float32]
    last: NDArray[np.int64]
    contexts: Contexts


def pack(
    contexts: Contexts,
    parents: Sequence[int],
    segments: Sequence[Sequence[int]],
    inner: Sequence[int] | None = None,
) -> Pack:
    """Pack `segments` behind `contexts`.

    `parents[s]`: context that segment s continues. `inner[s]`: an earlier segment of this pack
    that segment s continues instead, or -1. No segment may be empty.
    """
    lengths = np.fromiter(map(len, segments), np.int64, len(segments))
    ids = np.fromiter((t for s in segments for t in s), np.int64, int(lengths.sum()))
    parent = np.asarray(parents, np.int64)
    count, past = len(lengths), contexts.visible.shape[1]
    ends = np.cumsum(lengths)
    owner = np.repeat(np.arange(count), lengths)
    order = np.arange(len(ids))
    start = contexts.position[parent]
    same = owner[:, None] == owner
    if inner is not None:
        start = start.copy()
        ancestors = np.eye(count, dtype=np.bool_)
        for segment, before in enumerate(inner):
            if before >= 0:
                ancestors[segment] |= ancestors[before]
                start[segment] = start[before] + lengths[before]
        same = ancestors[owner][:, owner]
    see = np.empty((len(ids), past + len(ids)), np.bool_)
    see[:, :past] = contexts.visible[parent[owner]]
    np.logical_and(same, order <= order[:, None], out=see[:, past:])
    bias = np.where(see, np.float32(0), MASKED)[None, None]
    position = start[owner] + order - (ends - lengths)[owner]
    positions = np.ascontiguousarray(np.broadcast_to(position, (3, 1, len(ids))))
    last = ends - 1
    return Pack(ids, positions, bias, last, Contexts(see[last], start + lengths))
