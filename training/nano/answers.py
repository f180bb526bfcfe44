"""Every answer line of many surface samples at once: the best ones, or a sampled group of them.

As the station decodes: one trunk, then class, score and the 48 grid rows as branches behind it,
by the grammar of ascending columns. The trunk's keys and values are computed once; all branches of
all samples then grow a token at a time, rows that are equal so far once for the whole group, and
only rows that are not finished go on. The training weight of `none` is undone (`grammar_bias`), so
what is sampled is what the station reads. Gradients flow through the log-probabilities of what was
chosen: one forward both samples and trains.

Knows the nano model and the surface pools; no rewards, no optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.contract import tasks
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from training.nano import model as nano
from training.nano import pack
from training.nano.pools import SurfacePool

COLUMNS = tasks.GRID_ROWS
LONGEST_ROW = COLUMNS + 1
"""Tokens of the longest row: sixteen columns and the newline."""
FIRST, CLASS, SCORE = 0, COLUMNS + 1, COLUMNS + 2
"""States: what may be chosen behind a row key, column 1..16 (states 1..16), `class:`, `score:`."""
ROWS = len(tasks.ROW_KEYS)
CLASS_LINE, SCORE_LINE, LINES = ROWS, ROWS + 1, ROWS + 2
"""Lines of an answer: the grid rows in the order of `tasks.ROW_KEYS`, class, score."""

_Cache = list[tuple[torch.Tensor, torch.Tensor]]


def _ids(texts: list[str]) -> list[int]:
    return [pack.encode(text)[0] for text in texts]


_NUMBERS = [str(c + 1) for c in range(COLUMNS)]
_NEXT = [pack.encode(f"1,{number}")[1] for number in _NUMBERS]
TOKENS = torch.tensor(
    [
        *_ids([tasks.NONE, "\n"]),
        *_ids(_NUMBERS),
        *_NEXT,
        *_ids(list(tasks.SURFACE_CLASSES)),
        *_ids(["0"]),
    ]
)
"""Ids of the tokens that are ever chosen; below, a choice is a place in this list."""
NONE, NEWLINE, FIRST_COLUMN, NEXT_COLUMN = 0, 1, 2, 2 + COLUMNS
CLASSES = slice(2 + 2 * COLUMNS, 2 + 2 * COLUMNS + len(tasks.SURFACE_CLASSES))
SCORES = torch.tensor([len(TOKENS) - 1, *range(FIRST_COLUMN, FIRST_COLUMN + len(tasks.SCORES) - 1)])
"""Scores 0..10: their numbers are tokens of columns too, save for the 0."""


def _grammar() -> torch.Tensor:
    """float32 [states, choices] to add to logits: -inf where the grammar forbids a token.

    At the start of a row `none` gains log(1 / NONE_WEIGHT): its loss was weighted by that, so the
    softmax of the sum is the station's corrected distribution.
    """
    bias = torch.full((COLUMNS + 3, len(TOKENS)), -torch.inf)
    bias[FIRST, FIRST_COLUMN:NEXT_COLUMN] = 0.0
    bias[FIRST, NONE] = -math.log(pack.NONE_WEIGHT)
    for state in range(1, COLUMNS + 1):
        bias[state, NEXT_COLUMN + state : NEXT_COLUMN + COLUMNS] = 0.0
        bias[state, NEWLINE] = 0.0
    bias[CLASS, CLASSES] = 0.0
    bias[SCORE, SCORES] = 0.0
    return bias


GRAMMAR = _grammar()


def _column(choices: torch.Tensor) -> torch.Tensor:
    """0-based columns of choices that are columns; one more is the state behind them."""
    return (choices - FIRST_COLUMN) % COLUMNS


@dataclass(frozen=True)
class Prompts:
    """Trunks of B surface samples with their truth: grid bool [B, 3, 16, 16], defect and score
    int [B]; start: position behind each trunk, int [B]."""

    trunks: list[pack.Packed]
    start: list[int]
    grid: np.ndarray
    defect: np.ndarray
    score: np.ndarray

    def __len__(self) -> int:
        return len(self.trunks)


def prompts(pool: SurfacePool, index: np.ndarray, rng: np.random.Generator | None) -> Prompts:
    """The trunks of a pool's samples; `rng` jitters the measured size as supervised training."""
    meta = pool.shards.meta
    trunks, starts = [], []
    for i in index.tolist():
        size = meta["size"][i] * (1.0 if rng is None else rng.normal(1, 0.005, 3))
        length, width, height = (float(value) for value in size)
        facts = tasks.surface_facts(pack.PART_IDS[int(meta["part"][i])], (length, width, height))
        trunk = pack.Packed()
        starts.append(
            trunk.add_trunk(tasks.TRUNK_OPEN, NANO_LAYOUT.surface_size, facts + tasks.ASSISTANT)
        )
        trunks.append(trunk)
    return Prompts(
        trunks,
        starts,
        meta["grid"][index],
        meta["defect"][index].astype(np.int64),
        meta["score"][index].astype(np.int64),
    )


class Vision:
    """Vision tokens of a pool's pictures. Frozen: computed once a picture and kept (bfloat16)."""

    def __init__(self, forward: nano.Forward, pool: SurfacePool, *, frozen: bool) -> None:
        self.forward, self.pool, self.frozen = forward, pool, frozen
        self.kept: dict[int, torch.Tensor] = {}
        self._rng = np.random.default_rng(0)  # which pictures lack their reference

    def __call__(self, index: np.ndarray) -> torch.Tensor:
        """Tokens [B, T, W] of the samples `index`, with a gradient unless frozen."""
        if not self.frozen:
            return self._seen(index)
        new = np.array([i for i in np.unique(index).tolist() if i not in self.kept], np.int64)
        if len(new):
            with torch.no_grad():
                tokens = self._seen(new).to(torch.bfloat16)
            self.kept.update(zip(new.tolist(), tokens.unbind(0), strict=True))
        return torch.stack([self.kept[i] for i in index.tolist()]).float()

    def _seen(self, index: np.ndarray) -> torch.Tensor:
        return self.forward.vision(torch.from_numpy(self.pool.pictures(index, self._rng)))


@dataclass(frozen=True)
class Answers:
    """Answers of B samples, G each. cells bool [B, G, 3, 16, 16]; defect, score int [B, G].

    tokens int [B, G]: choices made. overrun bool [B, G, 48]: the row was cut off before it ended,
    `cells` holds what there was. class_odds [B, 5], score_odds [B, 11], nonempty [B, 48]: the
    model's own, corrected.

    logprobs float32 [K]: of every choice that was made; made int64 [3, K]: its sample, member of
    the group and line.
    """

    cells: np.ndarray
    defect: np.ndarray
    score: np.ndarray
    tokens: np.ndarray
    overrun: np.ndarray
    class_odds: np.ndarray
    score_odds: np.ndarray
    nonempty: np.ndarray
    logprobs: torch.Tensor
    made: torch.Tensor


def joined(parts: list[Answers]) -> Answers:
    """Answers to several batches as one, without their log-probabilities."""
    names = [f.name for f in fields(Answers) if f.name not in ("logprobs", "made")]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Answers(**arrays, logprobs=torch.empty(0), made=torch.empty(3, 0, dtype=torch.long))


def sample(
    model: Qwen2_5_VLForConditionalGeneration,
    given: Prompts,
    embeds: torch.Tensor,
    group: int,
    rng: np.random.Generator,
    longest_row: int = LONGEST_ROW,
) -> Answers:
    """`group` answers a sample, drawn from the corrected distribution."""

    def choose(logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        below = logits.double().softmax(-1).cumsum(-1)
        drawn = torch.from_numpy(rng.random(below.shape[:-1])) * below[..., -1]
        return (below <= drawn[..., None]).sum(-1)

    return _answer(model, given, embeds, group, choose, longest_row)


def best(
    model: Qwen2_5_VLForConditionalGeneration,
    given: Prompts,
    embeds: torch.Tensor,
    row_threshold: float,
) -> Answers:
    """The station's read-out: a row is written from P(row non-empty) >= `row_threshold`; then the
    most probable column at each step. Class and score: the most probable."""

    def choose(logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        filled = 1 - logits.softmax(-1)[..., NONE]
        chosen = torch.where(filled >= row_threshold, logits[..., 1:].argmax(-1) + 1, NONE)
        return torch.where(states == FIRST, chosen, logits.argmax(-1))

    return _answer(model, given, embeds, 1, choose, LONGEST_ROW)


def _answer(
    model: Qwen2_5_VLForConditionalGeneration,
    given: Prompts,
    embeds: torch.Tensor,
    group: int,
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    longest_row: int,
) -> Answers:
    """`choose(logits [..., choices] with the grammar added, states [...]) -> choices [...]`."""
    count = len(given)
    grower = _Grower(model, given, embeds)
    trace = _Trace()
    member_of = torch.arange(group).expand(count, group)
    sample_of = torch.arange(count)[:, None].expand(count, group)

    heads = torch.tensor(_ids([*VIEWS, tasks.CLASS_KEY, tasks.SCORE_KEY]))
    every = torch.arange(count)
    logits = grower.grow(every.repeat_interleave(len(heads)), None, heads.repeat(count))
    logits = logits.view(count, len(heads), -1)[:, len(VIEWS) :] + GRAMMAR[[CLASS, SCORE]]
    odds = logits.detach().softmax(-1)
    picked = choose(
        logits.detach()[:, None].expand(-1, group, -1, -1), torch.tensor([CLASS, SCORE])
    )
    for k, line in enumerate((CLASS_LINE, SCORE_LINE)):
        logprobs = logits[:, k].log_softmax(-1).gather(1, picked[..., k])
        trace.add(logprobs, sample_of, member_of, line)

    keys = torch.tensor([pack.encode(tasks.row_key(*key))[1] for key in tasks.ROW_KEYS])
    views = torch.tensor([VIEWS.index(view) for view, _ in tasks.ROW_KEYS])
    parents = (every[:, None] * len(heads) + views).flatten()
    logits = grower.grow(every.repeat_interleave(ROWS), parents, keys.repeat(count))
    logits = logits.view(count, ROWS, -1) + GRAMMAR[FIRST]
    nonempty = 1 - logits.detach().softmax(-1)[..., NONE]
    token = choose(logits.detach()[:, None].expand(-1, group, -1, -1), torch.tensor(FIRST))
    # [B, G, rows] of [B, rows, choices]
    first = logits.log_softmax(-1).gather(2, token.transpose(1, 2)).transpose(1, 2)
    trace.add(first, *torch.meshgrid(*map(torch.arange, token.shape), indexing="ij"))

    cells = np.zeros((count, group, ROWS, COLUMNS), bool)
    overrun = np.zeros((count, group, ROWS), bool)
    # Rows under way: their sample, member and row; the column just written; its parent branch.
    where = (token != NONE).nonzero().T.contiguous()
    column, parent = token[tuple(where)], where[0] * ROWS + where[2]
    for made in range(1, longest_row + 1):
        cells[(*where.numpy(), _column(column).numpy())] = True
        if made == longest_row or not where.shape[1]:
            overrun[tuple(where.numpy())] = True
            break
        nodes, node_of = torch.stack([where[0], parent, column]).unique(dim=1, return_inverse=True)
        samples, parents, choices = nodes.contiguous()
        states = _column(choices) + 1
        logits = grower.grow(samples, parents, TOKENS[choices]) + GRAMMAR[states]
        logits = logits.index_select(0, node_of)
        after = choose(logits.detach(), states[node_of])
        trace.add(logits.log_softmax(-1).gather(1, after[:, None])[:, 0], *where)
        goes_on = after != NEWLINE
        where, column, parent = where[:, goes_on], after[goes_on], node_of[goes_on]
    made_of = torch.cat(trace.made, 1)
    tokens = np.zeros((count, group), np.int64)
    np.add.at(tokens, tuple(made_of[:2].numpy()), 1)
    return Answers(
        cells.reshape(count, group, len(VIEWS), tasks.GRID_ROWS, COLUMNS),
        (picked[..., 0] - CLASSES.start).numpy(),
        (picked[..., 1, None] == SCORES).int().argmax(-1).numpy(),
        tokens,
        overrun,
        odds[:, 0, CLASSES].numpy(),
        odds[:, 1, SCORES].numpy(),
        nonempty.numpy(),
        torch.cat(trace.logprobs),
        made_of,
    )


class _Trace:
    """Choices in the order they were made."""

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []

    def add(
        self, logprobs: torch.Tensor, samples: Any, members: Any, lines: torch.Tensor | int
    ) -> None:
        self.logprobs.append(logprobs.flatten())
        line = torch.as_tensor(lines).expand(logprobs.shape)
        self.made.append(torch.stack([part.flatten() for part in (samples, members, line)]))


class _Grower:
    """Branches behind cached trunks. `grow` feeds one more token to chosen branches."""

    def __init__(
        self, model: Qwen2_5_VLForConditionalGeneration, given: Prompts, embeds: torch.Tensor
    ) -> None:
        self.model = model
        self.language = model.model.language_model
        self.heads = model.config.text_config.num_attention_heads
        self.eps = model.config.text_config.rms_norm_eps
        self.start = torch.tensor(given.start)
        self.own: _Cache = []
        self.length = 0
        batch = pack.collate(given.trunks)
        inputs = with_image(model, batch.tokens, embeds)
        self.unseen = torch.zeros(len(given), 1, inputs.shape[1])
        self.unseen.masked_fill_((batch.segment == pack.PAD)[:, None], -1e4)
        bias = torch.zeros(batch.mask.shape).masked_fill_(~batch.mask, -1e4)

        def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor | None:
            self.trunk.append((k, v))
            last = layer + 1 == len(self.language.layers)  # of it only keys and values are read
            return None if last else nano._attend(q, k, v, bias)

        self.trunk: _Cache = []
        self._layers(inputs, batch.position, attend)

    def grow(
        self, samples: torch.Tensor, parents: torch.Tensor | None, tokens: torch.Tensor
    ) -> torch.Tensor:
        """One more token on K branches, in the order of their samples -> logits [K, choices].

        `parents` [K]: which branch of the last call each continues; None at the first call.
        """
        # Against the trunk: the branches of a sample side by side, padded. Against itself: flat.
        slot = torch.arange(len(samples)) - torch.searchsorted(samples, samples)
        count, width = len(self.start), int(slot.max()) + 1
        place = samples * width + slot
        before = self.own
        if parents is not None:
            before = [(k.index_select(0, parents), v.index_select(0, parents)) for k, v in before]
        own: _Cache = []

        def padded(values: torch.Tensor) -> torch.Tensor:
            """[K, H, D] -> [B, H, M, D]"""
            empty = values.new_zeros(count * width, *values.shape[1:])
            spread = empty.index_copy(0, place, values)
            return spread.view(count, width, *values.shape[1:]).transpose(1, 2)

        def flat(values: torch.Tensor) -> torch.Tensor:
            """[B, H, M, D] -> [K, H, D]"""
            return values.transpose(1, 2).flatten(0, 1).index_select(0, place)

        def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
            q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # [K, H, D]
            q, k, v = q * q.shape[-1] ** -0.5, k[:, :, None], v[:, :, None]
            if before:
                k = torch.cat([before[layer][0], k], 2)
                v = torch.cat([before[layer][1], v], 2)
            own.append((k, v))
            trunk_k, trunk_v = self.trunk[layer]
            seen = flat(torch.matmul(padded(q), trunk_k.transpose(-1, -2))).float()
            seen = seen + self.unseen[samples]
            mine = (q[:, :, None] * k).sum(-1).float()
            weight = torch.cat([seen, mine], -1).softmax(-1).to(v.dtype)
            split = seen.shape[-1]
            mixed = flat(torch.matmul(padded(weight[..., :split]), trunk_v))
            mixed = mixed + (weight[..., split:, None] * v).sum(2)
            return mixed.transpose(0, 1)[None]

        inputs = self.language.embed_tokens(tokens)[None]
        position = (self.start[samples] + self.length).expand(3, 1, -1)
        hidden = self._layers(inputs, position, attend)[0]
        self.own, self.length = own, self.length + 1
        return F.linear(hidden, self.model.lm_head.weight.index_select(0, TOKENS)).float()

    def _layers(
        self, h: torch.Tensor, position: torch.Tensor, attend: Callable[..., torch.Tensor | None]
    ) -> torch.Tensor:
        """The text layers of `nano.Forward` with the attention left open (None: stop there)."""
        cos, sin = self.language.rotary_emb(h, position)
        cos, sin = cos[:, None], sin[:, None]
        batch, length, width = h.shape
        for number, layer in enumerate(self.language.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x = nano._norm(h, layer.input_layernorm.weight, self.eps)
            q, k, v = (
                projection(x).view(batch, length, self.heads, -1).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            mixed = attend(number, nano._rotate(q, cos, sin), nano._rotate(k, cos, sin), v)
            if mixed is None:
                return h
            h = h + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
            x = nano._norm(h, layer.post_attention_layernorm.weight, self.eps)
            h = h + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return nano._norm(h, self.language.norm.weight, self.eps)


def with_image(
    model: Qwen2_5_VLForConditionalGeneration, tokens: torch.Tensor, embeds: torch.Tensor
) -> torch.Tensor:
    """Token embeddings [B, T, W] with the image tokens replaced by `embeds`."""
    inputs = model.model.language_model.embed_tokens(tokens)
    start = int((tokens[0] == model.config.image_token_id).nonzero()[0, 0])
    end = start + embeds.shape[1]
    return torch.cat([inputs[:, :start], embeds.to(inputs.dtype), inputs[:, end:]], 1)
