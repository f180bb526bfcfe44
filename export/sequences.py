"""Recorded questions as the token sequences that the decoder reads: trunk and lines, one mask.

The layout is made by the station's own functions, so that calibration sees what a station computes.
It knows no quantiser.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError
from forge_station.vlm.engine import Graph
from forge_station.vlm.model import IMAGE_TOKEN
from forge_station.vlm.packing import MASKED, Contexts, pack
from forge_station.vlm.preprocess import (
    FloatArray,
    VisionGeometry,
    mrope_positions,
    patchify,
    vision_layout,
)
from forge_station.vlm.recorded import Image, Question
from forge_station.vlm.text import TextCodec


@dataclass(frozen=True)
class Sequence:
    """S tokens: `embeds` float32 [S, H], `positions` int64 [3, S], `bias` float32 [S, S] (0 where a
    token sees another, else very negative), `answers` int64: tokens whose logits are asked for."""

    embeds: FloatArray
    positions: NDArray[np.int64]
    bias: FloatArray
    answers: NDArray[np.int64]


def picture_tokens(
    vision: Graph, geometry: VisionGeometry, images: ListOf[Image]
) -> list[FloatArray]:
    """Language tokens [T, H] of every picture."""
    found = []
    for image in images:
        layout = vision_layout(*geometry.grid(*image.shape[:2]), geometry)
        feeds: dict[str, NDArray[Any]] = {
            "pixel_values": patchify(image, geometry)[layout.source][None],
            "valid": layout.valid,
            "pos_hw": layout.position,
            "out_index": layout.out_index,
        }
        found.append(vision.run(feeds)[0][0])
    return found


def sequences(
    questions: ListOf[Question],
    codec: TextCodec,
    table: Path,
    vision: Path,
    geometry: VisionGeometry,
) -> list[Sequence]:
    """All questions; `table` and `vision` are files of the bundle that is being written."""
    embed = np.load(table, mmap_mode="r")
    graph = Graph(vision)
    return [_sequence(question, codec, embed, graph, geometry) for question in questions]


def _sequence(
    question: Question,
    codec: TextCodec,
    embed: NDArray[Any],
    vision: Graph,
    geometry: VisionGeometry,
) -> Sequence:
    pieces = question.text.split(IMAGE_TOKEN)
    if len(pieces) != len(question.images) + 1 or not question.lines:
        raise InputError(
            "a recorded question is malformed",
            expected=f"{len(pieces) - 1} pictures, and a line",
            got=f"{len(question.images)} pictures, {len(question.lines)} lines",
        )
    token = codec.token_id(IMAGE_TOKEN)
    grids = [geometry.token_grid(*image.shape[:2]) for image in question.images]
    ids = list(codec.encode(pieces[0]))
    for (rows, columns), piece in zip(grids, pieces[1:], strict=True):
        ids += [token] * (rows * columns) + codec.encode(piece)
    trunk = np.array(ids, np.int64)
    positions, position = mrope_positions(trunk, token, grids)
    segments = [
        (*codec.encode_key(line.key), *codec.encode(line.answer)) for line in question.lines
    ]
    keys = [len(codec.encode_key(line.key)) for line in question.lines]
    packed = pack(Contexts.root(len(trunk), position), [0] * len(segments), segments)
    embeds = np.asarray(embed[np.concatenate([trunk, packed.ids])], np.float32)
    if question.images:
        pictures = picture_tokens(vision, geometry, question.images)
        embeds[: len(trunk)][trunk == token] = np.concatenate(pictures)
    length = len(trunk)
    bias = np.full((len(embeds), len(embeds)), MASKED, np.float32)
    bias[:length, :length][np.tril(np.ones((length, length), bool))] = 0
    bias[length:] = packed.bias[0, 0]
    starts = packed.last + 1 - np.array([len(segment) for segment in segments])
    # The last token of a key predicts the first of the answer; the answer's last predicts nothing.
    answers = [
        length + np.arange(start + key - 1, last)
        for start, key, last in zip(starts, keys, packed.last, strict=True)
    ]
    return Sequence(
        embeds,
        np.concatenate([positions, packed.positions[:, 0]], axis=1),
        bias,
        np.concatenate(answers),
    )
