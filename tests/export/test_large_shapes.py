"""The widths of 3B, cut to two layers: an export holds one tensor in memory, and goes through.

The full 36 layers: `python -m training.large.shapes --write 3b`, then `export.bundle`.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import nano_checkpoint
from tests.export.test_network import OLD

LAYERS = 2
MEASURED = """
import json, resource, sys
from pathlib import Path
from export.bundle import Release, write_bundle
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
checkpoint, out = sys.argv[1:]
release = Release("large", "0.1.0", precision="w4a16")
manifest = write_bundle(Path(checkpoint), Path(out), release)
print(json.dumps({"before": before, "peak": peak(), "model": dict(manifest.model)}))
"""


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the published checkpoint at true widths, two layers of each tower."""
    text, vision = OLD, OLD["vision_config"]
    wide, inner = text["hidden_size"], text["intermediate_size"]
    narrow = text["num_key_value_heads"] * wide // text["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (640, wide)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            found[f"{base}self_attn.{part}_proj.weight"] = (rows, wide)
            found[f"{base}self_attn.{part}_proj.bias"] = (rows,)
        found[f"{base}self_attn.o_proj.weight"] = (wide, wide)
        found[f"{base}mlp.gate_proj.weight"] = found[f"{base}mlp.up_proj.weight"] = (inner, wide)
        found[f"{base}mlp.down_proj.weight"] = (wide, inner)
        found[f"{base}input_layernorm.weight"] = (wide,)
        found[f"{base}post_attention_layernorm.weight"] = (wide,)
    found["model.norm.weight"] = (wide,)
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    found["visual.patch_embed.proj.weight"] = (width, 3, 2, 14, 14)
    linear = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    linear |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    linear |= {"mlp.down_proj": (width, inner)}
    for block in range(LAYERS):
        for name, shape in linear.items():
            found[f"visual.blocks.{block}.{name}.weight"] = shape
            found[f"visual.blocks.{block}.{name}.bias"] = shape[:1]
        for norm in ("norm1", "norm2"):
            found[f"visual.blocks.{block}.{norm}.weight"] = (width,)
    found["visual.merger.ln_q.weight"] = (width,)
    for number, rows in ((0, 4 * width), (2, wide)):
        found[f"visual.merger.mlp.{number}.weight"] = (rows, 4 * width)
        found[f"visual.merger.mlp.{number}.bias"] = (rows,)
    return found


def write_shard(path: Path, names: list[str], sizes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file in bfloat16 whose weights repeat one small random pool."""
    pool = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    pool = (pool.view(np.uint32) >> 16).astype(np.uint16)
    header, at = {}, 0
    for name in names:
        size = 2 * int(np.prod(sizes[name]))
        header[name] = {"dtype": "BF16", "shape": sizes[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            np.resize(pool, int(np.prod(sizes[name]))).tofile(file)


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cut")
    sizes = shapes()
    names = list(sizes)
    files = {f"model-{n + 1}-of-3.safetensors": names[n::3] for n in range(3)}
    for file, own in files.items():
        write_shard(folder / file, own, sizes)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokenizer = nano_checkpoint.word_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **OLD, "num_hidden_layers": LAYERS, "vocab_size": 640,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "vision_config": {**OLD["vision_config"], "depth": LAYERS, "fullatt_block_indexes": [1]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_an_export_of_3b_widths_holds_one_tensor(cut, tmp_path):
    command = [sys.executable, "-c", MEASURED, str(cut), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.strip().splitlines()[-1])
    largest = 4 * max(int(np.prod(shape)) for shape in shapes().values())
    whole = 4 * sum(int(np.prod(shape)) for shape in shapes().values())
    used = said["peak"] - said["before"]
    assert used < 6 * largest, "a tensor in float32, and what its blocks need beside it"
    assert used < 0.6 * whole
    assert said["model"]["head_dim"] == 128 and said["model"]["kv_heads"] == 2
