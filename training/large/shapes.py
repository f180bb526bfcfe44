"""Will it fit? A large model on the meta device: shapes, FSDP2 plan, memory a GPU. No weights.

    python -m training.sft --model 3b-shape --dry-run --gpus 8 --method full
    python -m training.large.shapes --write 3b --layers 2 --out .work/3b-cut

Memory is arithmetic: weights, gradients and optimizer exactly; what is gathered, kept and computed
in passing by the formulas of `memory`. Not in it: the CUDA context and fragmentation, for which a
fifth is set aside. The second command writes random weights at true widths, with the nano
tokenizer, to time a step on a machine that has no checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from training.large import checkpoint, sharding
from training.large.checkpoint import RunError

GIB = 2**30
RESERVE = 0.2
"""Share of a GPU that is set aside for context and fragmentation (a guess, not measured)."""
_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_TEXT = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    },
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""The language side of the published checkpoints; the vision tower is the same but its output."""


def shape_config(name: str, layers: int | None = None) -> Qwen2_5_VLConfig:
    """Configuration of `3b` or `7b`; `layers` cuts both towers to so many at true widths."""
    if name not in SHAPES:
        raise RunError("not a known shape", expected=" or ".join(SHAPES), got=name)
    shape = SHAPES[name]
    text = _TEXT | shape
    vision = _VISION | {"out_hidden_size": shape["hidden_size"]}
    if layers is not None:
        text |= {"num_hidden_layers": layers}
        vision |= {"depth": layers, "fullatt_block_indexes": [layers - 1]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=shape["tie_word_embeddings"],
        **_IDS,
    )
    config._attn_implementation = "sdpa"
    return config


def meta_model(config: Qwen2_5_VLConfig) -> Qwen2_5_VLForConditionalGeneration:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(config).to("meta")  # buffers too


@dataclass(frozen=True)
class Group:
    """A shard group of FSDP2: `count` modules of `name` with `parameters` each."""

    name: str
    count: int
    parameters: int


def plan(model: torch.nn.Module) -> list[Group]:
    """What `sharding.fsdp_config` wraps: the blocks; accelerate divides the rest once more, into
    embeddings with head and norm, which stay gathered, and the root."""
    sizes: dict[str, list[int]] = {name: [] for name in sharding.BLOCKS}
    for module in model.modules():
        name = type(module).__name__
        if name in sizes:
            sizes[name].append(_count(module))
    lost = [name for name, found in sizes.items() if not found]
    if lost:
        raise RunError("the sharding plan names classes the model lacks", got=", ".join(lost))
    groups = [Group(name, len(found), max(found)) for name, found in sizes.items()]
    wrapped = sum(sum(found) for found in sizes.values())
    return [*groups, Group("rest (embeddings, head, merger)", 1, _count(model) - wrapped)]


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Load:
    """What a process holds at once: examples, tokens of an example, tokens of its pictures."""

    micro: int = 1
    tokens: int = 2048
    picture_tokens: int = 768


def memory(
    model: torch.nn.Module, config: Any, method: str, gpus: int, load: Load
) -> dict[str, float]:
    """Bytes a GPU by what they are for.

    full: float32 weights, gradients and two moments, all sharded. lora: frozen bfloat16 weights,
    float32 adapters with theirs. Gathered in bfloat16: two shard groups of a sharded model (this
    one and the next); the head of the fused loss as it is stored, and its gradient before it is
    added up in full runs.
    Activations with checkpointing: the input of every layer, and the inside of one (16 widths and
    3 inner widths a token, bfloat16), the mask of the branches a byte a pair.
    """
    total = _count(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    text, vision = config.text_config, config.vision_config
    groups = plan(model)
    if method == "full":
        weights, gradients, optimizer = 4 * total, 4 * total, 8 * total
    else:
        weights = 2 * (total - trained) + 4 * trained
        gradients, optimizer = 4 * trained, 8 * trained
    sharded = gpus > 1
    head = text.vocab_size * text.hidden_size
    gathered = 2 * (groups[-1].parameters + 2 * groups[0].parameters) if sharded else 0
    copies = (8 if sharded else 4) if method == "full" else (2 if sharded else 0)
    tokens = load.micro * load.tokens
    patches = load.micro * load.picture_tokens * vision.spatial_merge_size**2
    kept = text.num_hidden_layers * tokens * text.hidden_size + vision.depth * patches * (
        vision.hidden_size
    )
    inside = max(
        tokens * (16 * text.hidden_size + 3 * text.intermediate_size),
        patches * (16 * vision.hidden_size + 3 * vision.intermediate_size),
    )
    return {
        "weights": weights / gpus,
        "gradients": gradients / gpus,
        "optimizer": optimizer / gpus,
        "gathered": float(gathered + copies * head),
        "activations": float(2 * (kept + inside) + load.micro * load.tokens**2),
    }


def check_shapes(config: Any, load: Load) -> dict[str, list[int]]:
    """Run both towers on the meta device, cut to two layers of the same; the shapes that came out.

    The two meet in a look-up of picture tokens that needs values, which meta tensors lack: so the
    towers run one after the other, and their widths are compared.
    """
    cut = copy.deepcopy(config)
    cut.text_config.num_hidden_layers, cut.text_config.layer_types = 2, ["full_attention"] * 2
    cut.vision_config.depth, cut.vision_config.fullatt_block_indexes = 2, [1]
    model: Any = meta_model(cut)
    vision, text = config.vision_config, config.text_config
    merge = vision.spatial_merge_size
    rows = max(1, int(load.picture_tokens**0.5))
    columns = -(-load.picture_tokens // rows)
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.empty(int(grid.prod()), patch, device="meta", dtype=torch.float32)
    where = torch.empty(len(pixels), 2, device="meta", dtype=torch.long)
    seen = model.model.visual(pixels, grid_thw=grid, position_ids=where).pooler_output
    length = load.tokens
    width = text.hidden_size
    inputs = torch.empty(load.micro, length, width, device="meta")
    sees = torch.empty(load.micro, 1, length, length, device="meta", dtype=torch.bool)
    positions = torch.empty(3, load.micro, length, device="meta", dtype=torch.long)
    hidden = model.model.language_model(
        inputs_embeds=inputs, attention_mask=sees, position_ids=positions, use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden)
    found = {
        "picture": list(seen.shape),
        "hidden": list(hidden.shape),
        "logits": list(logits.shape),
    }
    wanted = {
        "picture": [rows * columns, width],
        "hidden": [load.micro, length, width],
        "logits": [load.micro, length, text.vocab_size],
    }
    if found != wanted:
        raise RunError("shapes do not fit", expected=wanted, got=found)
    return found


def dry_run(args: argparse.Namespace) -> dict[str, Any]:
    """Print plan and memory of `args.model` on `args.gpus` GPUs; the figures."""
    begun = time.perf_counter()
    config = _config_of(args.model)
    model: Any = meta_model(config)
    total = _count(model)
    load = Load(args.micro, args.dry_tokens, args.dry_pictures)
    shapes = check_shapes(config, load)
    groups = plan(model)
    if args.method == "lora":
        model = get_peft_model(model, checkpoint.lora_config(args.rank, args.alpha, 0.0))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"{args.model}, {args.method}: {total / 1e9:.3f} B weights, {trained / 1e6:.1f} M trained"
    )
    print(f"towers run on the meta device: {shapes}")
    print("\nFSDP2 groups                          modules    parameters each")
    for group in groups:
        print(f"  {group.name:<34} {group.count:>8} {group.parameters / 1e6:>14.1f} M")
    counts = sorted({1, args.gpus} | {g for g in (2, 4, 8, 16) if g <= args.gpus})
    tables = {gpus: memory(model, config, args.method, gpus, load) for gpus in counts}
    _print_memory(tables, load, args.gpu_gib)
    needed = sum(tables[args.gpus].values()) / GIB
    return {
        "model": args.model,
        "method": args.method,
        "parameters": total,
        "trainable": trained,
        "gpus": args.gpus,
        "gib_per_gpu": round(needed, 2),
        "fits": needed <= args.gpu_gib * (1 - RESERVE),
        "tokens": load.tokens,
        "micro": load.micro,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def _print_memory(tables: Mapping[int, Mapping[str, float]], load: Load, gpu_gib: float) -> None:
    names = list(next(iter(tables.values())))
    print(f"\nGiB a GPU, {load.micro} x {load.tokens} tokens at once (arithmetic, not measured)")
    print("  GPUs " + "".join(f"{name:>13}" for name in (*names, "sum", "fits")))
    for gpus, table in tables.items():
        parts = [table[name] / GIB for name in names]
        fits = "yes" if sum(parts) <= gpu_gib * (1 - RESERVE) else "no"
        figures = "".join(f"{value:>13.2f}" for value in (*parts, sum(parts)))
        print(f"  {gpus:>4} {figures}{fits:>13}")
    print(f"fits: in {1 - RESERVE:.0%} of {gpu_gib:g} GiB; the rest is context and fragmentation\n")


def _config_of(model: str) -> Qwen2_5_VLConfig:
    if model.endswith("-shape"):
        return shape_config(model.removesuffix("-shape"))
    return Qwen2_5_VLConfig.from_json_file(str(checkpoint.checkpoint_file(model, "config.json")))


def write_random(
    folder: Path, name: str, layers: int | None = None, dtype: str = "bfloat16"
) -> int:
    """Write a checkpoint of random weights at true widths with the nano tokenizer; its size."""
    from training.nano.model import build_tokenizer

    tokenizer = build_tokenizer()
    token = tokenizer.token_to_id
    config = shape_config(name, layers)
    config.image_token_id = token("<|image_pad|>")
    config.vision_start_token_id = token("<|vision_start|>")
    config.vision_end_token_id = token("<|vision_end|>")
    config.text_config.bos_token_id = config.text_config.pad_token_id = token("<|endoftext|>")
    config.text_config.eos_token_id = token("<|im_end|>")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / checkpoint.TOKENIZER))
    return _count(model)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the dry run."""
    group = parser.add_argument_group("dry run (also for --model 3b-shape, 7b-shape)")
    group.add_argument("--dry-run", action="store_true", help="shapes and memory only, then stop")
    group.add_argument("--gpus", type=int, default=1, help="GPUs to shard over")
    group.add_argument("--gpu-gib", type=float, default=80.0, help="memory of one GPU")
    group.add_argument("--dry-tokens", type=int, default=2048, help="tokens of an example")
    group.add_argument("--dry-pictures", type=int, default=768, help="of them picture tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", choices=SHAPES, required=True, help="shape of the weights")
    parser.add_argument("--layers", type=int, help="cut both towers to so many layers")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    args = parser.parse_args()
    if (args.out / "config.json").exists():
        sys.exit(f"error: {args.out} holds a checkpoint; choose another --out")
    count = write_random(args.out, args.write, args.layers)
    print(json.dumps({"checkpoint": str(args.out), "parameters": count}))


if __name__ == "__main__":
    main()
