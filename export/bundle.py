"""Write the bundle folder of a checkpoint: graphs, embeddings, tokenizer, line, manifest, card.

    python -m export.bundle --checkpoint runs/nano --out station_config/demo/bundle \
        --precision int8 --line station_config/demo/line.yaml --references references.npz \
        --name demo-nano --version 0.2.0

The folder appears complete or not at all: everything is written beside it and renamed at the end.
Signing is another step. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from export import model_card
from export.decoder import PREFIX, write_decoder
from export.network import Network, read_network
from export.quantize import PRECISIONS, storage
from export.tensors import Checkpoint
from export.vision import write_vision
from forge_station.contract import CONTRACT_VERSION, record, spec
from forge_station.contract.error import StationError
from forge_station.contract.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    PhotoInput,
    Vocabulary,
)
from forge_station.contract.views import (
    CHANNELS,
    DIFFERENCE,
    LARGE_LAYOUT,
    NANO_LAYOUT,
    Layout,
)
from forge_station.errors import InputError
from forge_station.geometry import reference_io
from forge_station.vlm.grammar import columns
from forge_station.vlm.model import DECODER, EMBED, IMAGE_TOKEN, TOKENIZER, VISION
from forge_station.vlm.text import TextCodec

LINE, CARD = "line.yaml", "MODEL_CARD.md"
TRAINING_CARD = "training_card.json"
LAYOUTS: dict[str, Layout] = {"nano": NANO_LAYOUT, "large": LARGE_LAYOUT}
_EMBED_ROWS = 4096
_BYTES_PER_WEIGHT = {0: 4.0, 8: 1.13, 4: 0.63}


@dataclass(frozen=True)
class Release:
    """What a person decides about a bundle."""

    name: str
    version: str
    release_counter: int = 1
    precision: str = "int8"
    layout: str | None = None
    """`nano` or `large` pictures; None: nano for a window of 56 px."""
    line: Path | None = None
    references: Path | None = None
    """`references.npz` of the line's parts, for a model that is shown the difference from them."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    detectable: tuple[Mapping[str, Any], ...] = ()
    """Reports of `training.calibrate pod`: the promised sizes of the model card."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    created: str = ""


def write_bundle(
    checkpoint_folder: Path,
    out: Path,
    release: Release,
    *,
    replace: bool = False,
    progress: Callable[[str, int], object] = lambda _what, _steps: None,
) -> Manifest:
    """Write the folder `out`. Raises InputError; nothing is left behind on failure.

    `progress(what, steps)` is called after each piece of work; `steps_of` tells the total.
    """
    if release.precision not in PRECISIONS:
        raise InputError("precision", expected=", ".join(PRECISIONS), got=release.precision)
    if out.exists() and not (replace and (out / MANIFEST_NAME).is_file()):
        raise InputError(
            "output folder exists",
            which=out,
            action="choose another one, or give --replace for a bundle folder",
        )
    checkpoint = Checkpoint(checkpoint_folder)
    network = read_network(checkpoint_folder)
    codec = _check_tokenizer(checkpoint_folder / TOKENIZER, network)
    card = _training_card(checkpoint_folder / TRAINING_CARD)
    line_name, inspected = _check_line(release.line, codec)
    _check_references(release.references, card, inspected)
    _check_space(out.absolute().parent, checkpoint, network, release.precision)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_files(checkpoint, network, partial, release, progress)
        if release.line is not None:
            shutil.copyfile(release.line, partial / LINE)
        if release.references is not None:
            shutil.copyfile(release.references, partial / reference_io.FILE)
        draft = _manifest(checkpoint, network, codec, release, card, line_name, {})
        text = model_card.render(draft, card, release.evaluation, release.detectable)
        (partial / CARD).write_text(text, encoding="utf-8")
        files = {path.name: _entry(path) for path in sorted(partial.iterdir())}
        manifest = _manifest(checkpoint, network, codec, release, card, line_name, files)
        (partial / MANIFEST_NAME).write_bytes(manifest.to_json())
        progress("manifest", 1)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def steps_of(network: Network) -> int:
    """Pieces of work that `write_bundle` reports."""
    return network.text.layers + network.vision.depth + 2


def _write_files(
    checkpoint: Checkpoint,
    network: Network,
    folder: Path,
    release: Release,
    progress: Callable[[str, int], object],
) -> None:
    decoder_bits, vision_bits = PRECISIONS[release.precision]
    vision, decoder = _weights(checkpoint, network)
    write_decoder(
        checkpoint,
        network.text,
        folder / DECODER,
        storage(decoder_bits, decoder),
        lambda: progress("decoder", 1),
    )
    write_vision(
        checkpoint,
        network.vision,
        folder / VISION,
        storage(vision_bits, vision),
        lambda: progress("vision", 1),
    )
    write_embed(checkpoint, network, folder / EMBED, np.float16 if decoder_bits else np.float32)
    shutil.copyfile(checkpoint.folder / TOKENIZER, folder / TOKENIZER)
    progress("embeddings", 1)


def write_embed(
    checkpoint: Checkpoint, network: Network, path: Path, dtype: type[np.floating[Any]]
) -> None:
    """The embedding table as .npy [vocabulary, hidden]; a station maps it into memory."""
    shape = (network.text.vocab_size, network.text.hidden_size)
    table = checkpoint.read(f"{PREFIX}embed_tokens.weight", shape)
    target = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    for start in range(0, shape[0], _EMBED_ROWS):
        target[start : start + _EMBED_ROWS] = table[start : start + _EMBED_ROWS]
    target.flush()


def _manifest(
    checkpoint: Checkpoint,
    network: Network,
    codec: TextCodec,
    release: Release,
    card: Mapping[str, Any],
    line: str,
    files: Mapping[str, FileEntry],
) -> Manifest:
    text, vision = network.text, network.vision
    figures = model_card.brief(release.evaluation)
    layout = LAYOUTS[release.layout or ("nano" if vision.geometry.window == 56 else "large")]
    tokens = {"vocab_size": text.vocab_size, "image_pad": network.image_token}
    tokens["tokenizer_size"] = codec.vocab_size
    if text.eos is not None:
        tokens["eos"] = text.eos
    return Manifest(
        name=release.name,
        version=release.version,
        release_counter=release.release_counter,
        contract_version=CONTRACT_VERSION,
        precision=release.precision,
        files=files or {CARD: FileEntry.of(b"")},
        images={"sheet": layout.sheet_size, "surface": layout.surface_size},
        tokens=tokens,
        model={
            "parameters": checkpoint.parameters,
            "patch": vision.geometry.patch,
            "merge": vision.geometry.merge,
            "temporal": vision.geometry.temporal,
            "window": vision.geometry.window,
            "full_attention_blocks": list(vision.full_attention_blocks),
            "vision_layers": vision.depth,
            "vision_hidden_size": vision.hidden_size,
            "layers": text.layers,
            "hidden_size": text.hidden_size,
            "heads": text.heads,
            "kv_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "mrope_section": list(text.mrope_section),
            "none_weight": float(card.get("none_weight", 1.0)),
            "cell_px": layout.cell,
            "panel_px": layout.panel,
        },
        thresholds={**card.get("thresholds", {}), **release.thresholds},
        training={**card, **({"evaluation": figures} if figures else {})},
        created=release.created,
        line=line,
        surface_channels=_surface_channels(card),
        vocabulary=record.read(Vocabulary, card.get("vocabulary", {}), "training card, vocabulary"),
        photo=_photo_input(card),
    )


def _photo_input(card: Mapping[str, Any]) -> PhotoInput | None:
    """What the training card says of photos; None for a model of scans."""
    if card.get("photo") is None:
        return None
    return record.read(PhotoInput, card["photo"], "training card, photo")


def _surface_channels(card: Mapping[str, Any]) -> tuple[str, str, str]:
    first, second, third = card.get("surface_channels", CHANNELS)
    return str(first), str(second), str(third)


def _check_tokenizer(path: Path, network: Network) -> TextCodec:
    """The tokenizer knows the image token under the config's id, and splits grid rows."""
    if not path.is_file():
        raise InputError("checkpoint lacks its tokenizer", which=path)
    codec = TextCodec.open(path)
    found = codec.token_id(IMAGE_TOKEN)
    if found != network.image_token or codec.vocab_size > network.text.vocab_size:
        raise InputError(
            "tokenizer is not the one of this checkpoint",
            which=path,
            expected=f"{IMAGE_TOKEN} = {network.image_token}, at most {network.text.vocab_size}",
            got=f"{found}, {codec.vocab_size} tokens",
        )
    columns(codec)
    return codec


def _training_card(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("training card is not JSON", which=path, got=error) from error
    if not isinstance(card, dict):
        raise InputError("training card", which=path, expected="an object", got=type(card).__name__)
    return card


def _check_line(path: Path | None, codec: TextCodec) -> tuple[str, frozenset[str]]:
    """Name of the line, and its parts whose surface is inspected; the model can name all parts."""
    if path is None:
        return "", frozenset()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError("line file cannot be read", which=path, got=error) from error
    line = spec.parse_line(data, which=str(path))
    for part in {part for product in line.products for part in product.parts}:
        codec.encode(part)
    inspected = {part for p in line.products if "surface" in p.checks for part in p.parts}
    return line.line, frozenset(inspected)


def _check_references(
    path: Path | None, card: Mapping[str, Any], inspected: frozenset[str]
) -> None:
    """A model that compares needs a reference of every part whose surface the line inspects."""
    known = frozenset(reference_io.load(path)) if path is not None else frozenset()
    lacking = sorted(inspected - known)
    if DIFFERENCE in _surface_channels(card) and lacking:
        raise InputError(
            "parts without a reference",
            which=path or "--references",
            expected=f"a reference of {', '.join(lacking)}",
            got=f"{len(known)} references" if path else "none",
            action="make them: python -m training.references --line LINE --out references.npz",
        )


def _check_space(folder: Path, checkpoint: Checkpoint, network: Network, precision: str) -> None:
    """Refuse early when the disk cannot hold the bundle (weights, table and a tenth more)."""
    folder = next(f for f in (folder, *folder.parents) if f.exists())
    decoder_bits, vision_bits = PRECISIONS[precision]
    table = network.text.vocab_size * network.text.hidden_size
    vision, decoder = _weights(checkpoint, network)
    needed = decoder * _BYTES_PER_WEIGHT[decoder_bits] + vision * _BYTES_PER_WEIGHT[vision_bits]
    needed = 1.1 * (needed + table * (2 if decoder_bits else 4))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            "not enough disk space for the bundle",
            which=folder,
            expected=f"{needed / 1e6:.0f} MB",
            got=f"{free / 1e6:.0f} MB free",
        )


def _weights(checkpoint: Checkpoint, network: Network) -> tuple[int, int]:
    """Numbers of weights in (vision graph, decoder graph with lm_head)."""
    counts = {name: int(np.prod(checkpoint.shape(name))) for name in checkpoint.names()}
    vision = sum(count for name, count in counts.items() if name.startswith("model.visual."))
    table = network.text.vocab_size * network.text.hidden_size
    return vision, sum(counts.values()) - vision - (0 if network.text.tied else table)


def _entry(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return FileEntry(digest.hexdigest(), path.stat().st_size)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder training wrote")
    parser.add_argument("--out", type=Path, required=True, help="bundle folder to write")
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="int8")
    parser.add_argument("--line", type=Path, help="line.yaml to put into the bundle")
    parser.add_argument(
        "--references", type=Path, help="references.npz of the line (python -m training.references)"
    )
    parser.add_argument("--name", help="bundle name; default: name of the output folder")
    parser.add_argument("--version", default="0.1.0")
    parser.add_argument("--release", type=int, default=1, help="release counter, only ever grows")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="default: by the vision window")
    parser.add_argument("--evaluation", type=Path, help="JSON written by training.evaluate")
    parser.add_argument(
        "--pod", type=Path, nargs="*", default=[], help="pod.json files of training.calibrate pod"
    )
    parser.add_argument("--thresholds", type=Path, help="JSON object: name -> number")
    parser.add_argument("--replace", action="store_true", help="replace an existing bundle")
    args = parser.parse_args()
    begun = time.perf_counter()
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        network = read_network(args.checkpoint)
        release = Release(
            name=args.name or args.out.name,
            version=args.version,
            release_counter=args.release,
            precision=args.precision,
            layout=args.layout,
            line=args.line,
            references=args.references,
            evaluation=_json_object(args.evaluation),
            detectable=tuple(_json_object(path) for path in args.pod),
            thresholds=_json_object(args.thresholds),
            created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        with tqdm(total=steps_of(network), desc="bundle", unit="step") as bar:

            def advance(what: str, steps: int) -> None:
                bar.set_postfix_str(what)
                bar.update(steps)

            manifest = write_bundle(
                args.checkpoint, args.out, release, replace=args.replace, progress=advance
            )
    except StationError as error:
        print(f"export.bundle: {error}", file=sys.stderr)
        return 1
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    summary = {
        "bundle": str(args.out),
        "sha256": manifest.sha256,
        "precision": manifest.precision,
        "bytes": sum(sizes.values()),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(summary))
    return 0


def _json_object(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("JSON file cannot be read", which=path, got=error) from error
    if not isinstance(data, dict):
        raise InputError("JSON file", which=path, expected="an object", got=type(data).__name__)
    return data


if __name__ == "__main__":
    sys.exit(main())
