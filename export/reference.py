"""What transformers says, in float32: the peer that exported graphs are compared with.

It knows torch and a checkpoint, nothing of ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.vlm.packing import Contexts, pack
from forge_station.vlm.preprocess import VisionGeometry, mrope_positions, normalised_patches

Image = NDArray[np.uint8]


class Reference:
    """The checkpoint as transformers runs it. `ids` are trunk token ids with image tokens."""

    def __init__(self, folder: Path, geometry: VisionGeometry) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.geometry = geometry
        self.image_token = int(self.model.config.image_token_id)

    def image_embeds(self, images: Sequence[Image]) -> list[NDArray[np.float32]]:
        """Language tokens [T, H] of every image."""
        pixels, grids = self._pixels(images)
        with torch.no_grad():
            output = self.model.model.get_image_features(pixels, grids)
        return [embeds.numpy() for embeds in output.pooler_output]

    def packed_logits(
        self, images: Sequence[Image], ids: Sequence[int], segments: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Logits [tokens, V] of each segment: trunk and all segments in one masked sequence."""
        trunk = np.array(ids, np.int64)
        positions, position = mrope_positions(trunk, self.image_token, self._token_grids(images))
        packed = pack(Contexts.root(len(trunk), position), [0] * len(segments), segments)
        length = len(trunk) + len(packed.ids)
        mask = np.full((1, 1, length, length), np.finfo(np.float32).min, np.float32)
        causal = np.tril(np.ones((len(trunk), len(trunk)), bool))
        mask[0, 0, : len(trunk), : len(trunk)][causal] = 0
        mask[0, 0, len(trunk) :][packed.bias[0, 0] == 0] = 0
        logits = self._logits(
            images,
            np.concatenate([trunk, packed.ids]),
            np.concatenate([positions[:, None], packed.positions], axis=2),
            torch.from_numpy(mask),
            len(packed.ids),
        )
        return np.split(logits, packed.last[:-1] + 1)

    def alone_logits(
        self, images: Sequence[Image], ids: Sequence[int], segment: Sequence[int]
    ) -> NDArray[np.float32]:
        """Logits [tokens, V] of one segment read alone behind the trunk, the plain way."""
        tokens = torch.tensor([[*ids, *segment]])
        pixels, grids = self._pixels(images)
        with torch.no_grad():
            output = self.model(
                input_ids=tokens,
                pixel_values=pixels if images else None,
                image_grid_thw=grids if images else None,
                mm_token_type_ids=(tokens == self.image_token).int(),
                use_cache=False,
                logits_to_keep=len(segment),
            )
        result: NDArray[np.float32] = output.logits[0].numpy()
        return result

    def trunk_positions(self, images: Sequence[Image], ids: Sequence[int]) -> NDArray[np.int64]:
        """Position ids [3, S] as transformers computes them."""
        tokens = torch.tensor([list(ids)])
        _, grids = self._pixels(images)
        kinds = (tokens == self.image_token).int()
        positions, _ = self.model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)
        result: NDArray[np.int64] = positions[:, 0].numpy()
        return result

    def _logits(
        self,
        images: Sequence[Image],
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: torch.Tensor,
        keep: int,
    ) -> NDArray[np.float32]:
        pixels, grids = self._pixels(images)
        with torch.no_grad():
            output = self.model(
                input_ids=torch.from_numpy(ids)[None],
                pixel_values=pixels if images else None,
                image_grid_thw=grids if images else None,
                position_ids=torch.from_numpy(positions),
                attention_mask=mask,
                use_cache=False,
                logits_to_keep=keep,
            )
        result: NDArray[np.float32] = output.logits[0].numpy()
        return result

    def _pixels(self, images: Sequence[Image]) -> tuple[torch.Tensor, torch.Tensor]:
        if not images:
            return torch.zeros(0, 0), torch.zeros(0, 3, dtype=torch.long)
        pixels = np.concatenate([normalised_patches(image, self.geometry) for image in images])
        grids = [(1, *self.geometry.grid(*image.shape[:2])) for image in images]
        return torch.from_numpy(pixels), torch.tensor(grids)

    def _token_grids(self, images: Sequence[Image]) -> list[tuple[int, int]]:
        return [self.geometry.token_grid(*image.shape[:2]) for image in images]
