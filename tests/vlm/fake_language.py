"""A language model of a few lines that stands in for the decoder graph in tests.

Its logits depend on exactly the tokens that a position may see, in order, so any fault in masks,
caches or parents changes the numbers. `markov` makes them depend on the last token only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forge_station.vlm.packing import Pack


class FakeLanguage:
    def __init__(self, vocab: int, *, markov: bool = False, spread: float = 2.0) -> None:
        self.vocab, self.markov, self.spread = vocab, markov, spread
        self.passes = 0

    def trunk(self, ids: Sequence[int]) -> list[NDArray[np.int64]]:
        """A cache: token ids and positions of what was fed."""
        return [np.array(ids, np.int64), np.arange(len(ids))]

    def forward(
        self, packed: Pack, cache: Sequence[NDArray[np.int64]], wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], Sequence[NDArray[np.int64]]]:
        self.passes += 1
        ids = np.concatenate([cache[0], packed.ids])
        positions = np.concatenate([cache[1], packed.positions[0, 0]])
        assert packed.bias.shape == (1, 1, len(packed.ids), len(ids))
        rows = []
        for place in wanted:
            visible = np.nonzero(packed.bias[0, 0, place] == 0)[0]
            assert (np.diff(positions[visible]) == 1).all(), "positions must run on without a gap"
            assert visible[-1] == len(cache[0]) + place, "a token sees itself last"
            rows.append(self.logits(ids[visible].tolist()))
        return np.array(rows, np.float32), [ids, positions]

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        seen = list(context[-1:] if self.markov else context)
        seed = hashlib.sha256(repr(seen).encode()).digest()[:8]
        rng = np.random.default_rng(int.from_bytes(seed, "little"))
        return rng.normal(0, self.spread, self.vocab).astype(np.float32)

    def logprobs(self, context: Sequence[int], allowed: Sequence[int]) -> dict[int, float]:
        """Log-probability of each allowed token, renormalised over them."""
        row = self.logits(context).astype(np.float64)[list(allowed)]
        row -= np.log(np.exp(row - row.max()).sum()) + row.max()
        return dict(zip(allowed, row.tolist(), strict=True))
