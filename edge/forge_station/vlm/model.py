"""A vision-language model opened from a bundle: images and text in, constrained answers out.

It knows graphs, tokens and positions; prompts, checks and what an answer means live elsewhere.
One trunk (system text, images, facts) is computed once; answer lines are short branches behind it,
packed into one sequence under a mask. Keys and values stay where the graph wrote them, from the
trunk to the last token: no pass copies them through Python.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.bundles.trust import Trust
from forge_station.contract.manifest import Manifest
from forge_station.errors import BundleError, ModelError
from forge_station.vlm import decode, engine_cache, grammar, options, providers, soft_grid
from forge_station.vlm.bundle_files import verify_folder
from forge_station.vlm.decode import Branch, BranchResult, Cache, DecodeStats, Limits
from forge_station.vlm.engine import AUTO, Graph, Tensor
from forge_station.vlm.grammar import Grammar
from forge_station.vlm.packing import Contexts, Pack, pack
from forge_station.vlm.preprocess import (
    FloatArray,
    VisionGeometry,
    mrope_positions,
    patchify,
    vision_layout,
)
from forge_station.vlm.text import TextCodec

VISION, DECODER, EMBED, TOKENIZER = "vision.onnx", "decoder.onnx", "embed.npy", "tokenizer.json"
IMAGE_TOKEN = "<|image_pad|>"
_EMBED_IN_MEMORY = 64 * 2**20
_MOST_GRAMMARS = 64
"""Answer forms kept: more than a station's questions, and no growth with changing ones."""


@dataclass(frozen=True)
class Trunk:
    """What the model has read so far. Immutable: branches and extensions leave it as it is.

    `cache`: keys and values of each layer, float32 [1, kv heads, length, head size] on the device.
    `position`: where text continues. `ids`: all token ids.
    """

    cache: tuple[Tensor, ...]
    ids: tuple[int, ...]
    position: int

    @property
    def length(self) -> int:
        return len(self.ids)


class VisionLanguageModel:
    """Sessions of one bundle. A context manager; `close` may be called twice."""

    def __init__(
        self,
        manifest: Manifest,
        vision: Graph,
        decoder: Graph,
        embed: NDArray[Any],
        codec: TextCodec,
    ) -> None:
        self.manifest = manifest
        self.codec = codec
        self.geometry = VisionGeometry(
            **{name: _number(manifest, name) for name in ("patch", "merge", "temporal", "window")}
        )
        self.none_weight = float(manifest.model.get("none_weight", 1.0))
        self.image_token = codec.token_id(IMAGE_TOKEN)
        self.stats = DecodeStats(0, 0)
        self.fed = DecodeStats(0, 0)
        """Passes and tokens of the decoder since the model was opened."""
        self._vision: Graph | None = vision
        self._decoder: Graph | None = decoder
        self._embed = embed
        self._grammars: OrderedDict[tuple[object, ...], Grammar] = OrderedDict()
        self._past = [name for name in decoder.inputs if name.startswith("past.")]
        self._present = [name.replace("past.", "present.") for name in self._past]
        shapes = [decoder.inputs[name] for name in self._past]
        empty = [np.zeros((1, heads, 0, size), np.float32) for _, heads, _, size in shapes]
        self._empty = Trunk(tuple(map(decoder.tensor, empty)), (), 0)
        self._prefix: tuple[str, Trunk] = ("", self._empty)

    @classmethod
    def open(
        cls,
        bundle: Path | str,
        *,
        threads: int = 1,
        provider: str = AUTO,
        spinning: bool = False,
        prefix: str = "",
        engines: Path | None = None,
        trust: Trust | None = None,
    ) -> VisionLanguageModel:
        """Verify every file of the bundle folder, load it, and prove where it runs.

        `prefix` is the text that every trunk begins with, up to a special token: read once, here.
        Both graphs run once on a blank picture, so that an execution provider which does not do the
        work is an error before the first part. `engines`: folder with the TensorRT engines of this
        bundle (`engine_cache`). `trust`: whose bundles are taken; None: of anybody. Raises
        BundleError, ModelError.
        """
        files = verify_folder(Path(bundle), trust)
        manifest = files.manifest
        provider = providers.chosen(manifest, provider)
        settings = engine_cache.settings(manifest, engines)
        paths = {name: files.path(name) for name in (VISION, DECODER, EMBED, TOKENIZER)}
        codec = TextCodec.open(paths[TOKENIZER])
        embed = _open_embed(paths[EMBED])
        expected = (_number(manifest, "vocab_size"), _number(manifest, "hidden_size"))
        if embed.shape != expected or codec.vocab_size > expected[0]:
            raise BundleError(
                "embedding table does not fit the manifest",
                which=paths[EMBED],
                expected=f"{list(expected)} and at most {expected[0]} tokens",
                got=f"{list(embed.shape)} and {codec.vocab_size} tokens",
            )
        vision, decoder = (
            Graph(
                paths[name],
                threads=threads,
                provider=provider,
                spinning=spinning,
                settings=settings[name],
            )
            for name in (VISION, DECODER)
        )
        layers = sum(name.startswith("past.") for name in decoder.inputs)
        if "attention_bias" not in decoder.inputs or layers != 2 * _number(manifest, "layers"):
            raise BundleError(
                "decoder graph does not fit the manifest",
                which=paths[DECODER],
                expected=f"attention_bias and {_number(manifest, 'layers')} layers",
                got=", ".join(decoder.inputs),
            )
        model = cls(manifest, vision, decoder, embed, codec)
        model.warm_up()
        for graph in (vision, decoder):
            graph.check_placement()
        model._prefix = (prefix, model.extend(model._empty, prefix))
        return model

    def __enter__(self) -> VisionLanguageModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the sessions; using the model afterwards raises ModelError."""
        self._vision = self._decoder = None

    @property
    def provider(self) -> str:
        """Execution provider that the model really runs on; both where the graphs differ."""
        graphs = (self._graph(self._vision), self._graph(self._decoder))
        return "+".join(dict.fromkeys(graph.provider for graph in graphs))

    def warm_up(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Read a blank picture of each (height, width), by default a small one, and a token more.

        So memory is allocated and clocks are up when a part comes.
        """
        window = self.geometry.window
        for height, width in sizes or [(window, window)]:
            blank = np.zeros((height, width, 3), np.uint8)
            self.extend(self.extend(self._empty, IMAGE_TOKEN, [blank]), "\n")

    def options_grammar(self, texts: Sequence[str], *, prefix: str = " ") -> Grammar:
        """A line that reads one of `texts`; kept for the next part."""
        key = ("options", prefix, *texts)
        return self._kept(key, lambda: grammar.options(self.codec, texts, prefix=prefix))

    def columns_grammar(self, *, prefix: str = " ") -> Grammar:
        """A grid row: `none` or ascending columns; kept for the next part."""
        key = ("columns", prefix)
        return self._kept(key, lambda: grammar.columns(self.codec, prefix=prefix))

    def rows_grammar(self, keys: Sequence[str]) -> Grammar:
        """A whole grid as one text; kept for the next part."""
        return self._kept(("rows", *keys), lambda: grammar.rows(self.codec, keys))

    def _kept(self, key: tuple[object, ...], build: Callable[[], Grammar]) -> Grammar:
        """The grammar of `key`; the one that was not used for longest makes room."""
        if key not in self._grammars:
            while len(self._grammars) >= _MOST_GRAMMARS:
                self._grammars.popitem(last=False)
            self._grammars[key] = build()
        self._grammars.move_to_end(key)
        return self._grammars[key]

    def embed_images(self, images: Sequence[NDArray[np.uint8]]) -> list[FloatArray]:
        """uint8 [H, W, 3] RGB each -> float32 [tokens, hidden] each; one run per image size."""
        embeds: dict[int, FloatArray] = {}
        by_size: dict[tuple[int, ...], list[int]] = {}
        for number, image in enumerate(images):
            by_size.setdefault(image.shape, []).append(number)
        for shape, numbers in by_size.items():
            patches = [patchify(images[number], self.geometry) for number in numbers]
            layout = vision_layout(*self.geometry.grid(shape[0], shape[1]), self.geometry)
            feeds: dict[str, NDArray[Any]] = {
                "pixel_values": np.stack([p[layout.source] for p in patches]),
                "valid": layout.valid,
                "pos_hw": layout.position,
                "out_index": layout.out_index,
            }
            (result,) = self._graph(self._vision).run(feeds)
            embeds.update(zip(numbers, result, strict=True))
        return [embeds[number] for number in range(len(images))]

    def trunk(self, images: Sequence[NDArray[np.uint8]], text: str) -> Trunk:
        """Read `text`, in which `<|image_pad|>` stands once for every image of `images`.

        The model's prefix is not read again where `text` begins with it.
        """
        known, trunk = self._prefix
        if not text.startswith(known):
            known, trunk = "", self._empty
        return self.extend(trunk, text[len(known) :], images)

    def extend(self, trunk: Trunk, text: str, images: Sequence[NDArray[np.uint8]] = ()) -> Trunk:
        """The trunk with more text (and images) read behind it; the given one stays usable."""
        pieces = text.split(IMAGE_TOKEN)
        if len(pieces) != len(images) + 1:
            raise ModelError(
                "images do not match the text",
                expected=f"{len(pieces) - 1} images, one for every {IMAGE_TOKEN}",
                got=f"{len(images)} images",
            )
        grids = [self.geometry.token_grid(*image.shape[:2]) for image in images]
        ids = list(self.codec.encode(pieces[0]))
        for (rows, columns), piece in zip(grids, pieces[1:], strict=True):
            ids += [self.image_token] * (rows * columns) + self.codec.encode(piece)
        if not ids:
            return trunk
        array = np.array(ids, np.int64)
        positions, position = mrope_positions(array, self.image_token, grids, trunk.position)
        embeds = self._lookup(array)
        if images:
            embeds[array == self.image_token] = np.concatenate(self.embed_images(images))
        causal = pack(Contexts.root(trunk.length, 0), [0], [ids]).bias
        end = np.array([len(ids) - 1])
        _, cache = self._step(embeds, positions[:, None], causal, trunk.cache, end)
        return Trunk(tuple(cache), trunk.ids + tuple(ids), position)

    def decode_branches(
        self, trunk: Trunk, branches: Sequence[Branch], limits: Limits | None = None
    ) -> list[BranchResult]:
        """Answer all branches behind the trunk, in order. `stats` tells passes and tokens fed."""
        results, self.stats = decode.decode(
            self._forward,
            trunk.cache,
            Contexts.root(trunk.length, trunk.position),
            self.codec.encode_key,
            branches,
            self.none_weight,
            limits or Limits(),
        )
        return results

    def score_lines(
        self,
        trunk: Trunk,
        lines: Mapping[str, Sequence[str]],
        *,
        behind: str = "",
        floor: float = 0.0,
    ) -> dict[str, dict[str, float]]:
        """Answer lines, key -> options, all behind the trunk -> key -> option -> probability.

        The probabilities of a line are exact and sum to 1; one forward pass. `behind`: text to read
        first, in the same pass. `floor`: options that begin less probably than this are not told
        apart (`options.option_probabilities`); a few short passes instead of a long one.
        """
        asked = [
            options.OptionLine(tuple(self.codec.encode_key(key)), self.options_grammar(texts))
            for key, texts in lines.items()
        ]
        found = options.option_probabilities(
            self._forward,
            trunk.cache,
            Contexts.root(trunk.length, trunk.position),
            asked,
            behind=tuple(self.codec.encode(behind)),
            floor=floor,
        )
        return dict(zip(lines, found, strict=True))

    def soft_rows(
        self, trunk: Trunk, keys: Sequence[str], *, prefix: str = " ", floor: float = 0.02
    ) -> soft_grid.SoftRows:
        """Cell probabilities of the grid rows named by `keys`; at most two forward passes."""
        return soft_grid.soft_rows(
            self._forward,
            trunk.cache,
            Contexts.root(trunk.length, trunk.position),
            self.codec.encode_key,
            keys,
            self.columns_grammar(prefix=prefix),
            self.none_weight,
            floor,
        )

    def forward(self, trunk: Trunk, segments: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Logits [tokens, vocabulary] of every segment behind the trunk (parity checks)."""
        packed = pack(Contexts.root(trunk.length, trunk.position), [0] * len(segments), segments)
        logits, _ = self._forward(packed, trunk.cache, np.arange(len(packed.ids)))
        return np.split(logits, packed.last[:-1] + 1)

    def _forward(
        self, packed: Pack, cache: Cache, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], Cache]:
        logits, present = self._step(
            self._lookup(packed.ids), packed.positions, packed.bias, cache, positions
        )
        return logits, present

    def _step(
        self,
        embeds: FloatArray,
        positions: NDArray[np.int64],
        bias: FloatArray,
        cache: Cache,
        logit_positions: NDArray[np.int64],
    ) -> tuple[NDArray[np.float32], Cache]:
        feeds: dict[str, NDArray[Any]] = {
            "inputs_embeds": embeds[None],
            "position_ids": positions,
            "attention_bias": bias,
            "logit_positions": logit_positions[None],
        }
        past = dict(zip(self._past, cache, strict=True))
        self.fed = DecodeStats(self.fed.passes + 1, self.fed.tokens + len(embeds))
        logits, present = self._graph(self._decoder).run_bound(feeds, past, "logits", self._present)
        return logits[0], present

    def _lookup(self, ids: NDArray[np.int64]) -> FloatArray:
        return np.asarray(self._embed[ids], np.float32)

    @staticmethod
    def _graph(graph: Graph | None) -> Graph:
        if graph is None:
            raise ModelError("the model is closed", action="open the bundle again")
        return graph


def _open_embed(path: Path) -> NDArray[Any]:
    """The table [vocabulary, hidden]: memory-mapped when large, else float32 in memory."""
    try:
        table: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BundleError("embedding table cannot be read", which=path, got=error) from error
    if table.ndim != 2 or table.dtype not in (np.float16, np.float32):
        raise BundleError(
            "embedding table is malformed",
            which=path,
            expected="float16 or float32 [vocabulary, hidden]",
            got=f"{table.dtype} {list(table.shape)}",
        )
    return table if table.nbytes > _EMBED_IN_MEMORY else table.astype(np.float32)


def _number(manifest: Manifest, name: str) -> int:
    value = manifest.model.get(name, manifest.tokens.get(name))
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BundleError(
            "manifest lacks a number of the model",
            which=f"{manifest.name}: model.{name}",
            expected="a positive whole number",
            got=value,
            action="export the bundle again",
        )
    return value
