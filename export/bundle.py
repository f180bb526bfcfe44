"""Write the bundle folder of a checkpoint: graphs, embeddings, tokenizer, line, manifest, card.

    python -m export.bundle --checkpoint runs/nano --out station_config/demo/bundle \\
        --precision int8 --line station_config/demo/line.yaml --references references.npz \\
        --name demo-nano --version 0.2.0
    python -m export.bundle --checkpoint runs/3b --out lines/bolts --layout large \\
        --precision w4a16 --quantizer gptq --calibration questions.npz --gate .work/cases

The folder appears complete or not at all: everything is written beside it and renamed at the end. A
run that was killed goes on where it stopped. With --gate a bundle whose verdicts are not those of
full precision is not written (`export.verify` has the limits). export/README.md has targets and
precisions. Signing is another step (`forge-station bundle sign`). The last line of the output is
one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from export import golden as golden_set
from export import model_card, targets
from export.decoder import PREFIX, write_decoder
from export.drift import Drift
from export.gate import Degraded, Gate
from export.network import Network, read_network
from export.quantize import Nearest, Quantizer, hqq_scales, storage
from export.release import CARD, LAYOUTS, QUANTIZERS, Release, manifest_of, surface_channels
from export.sequences import sequences
from export.targets import PRECISIONS, TARGETS, Bits
from export.tensors import Checkpoint
from export.vision import write_vision
from forge_station.checks import Thresholds
from forge_station.contract import record, spec
from forge_station.contract.error import StationError
from forge_station.contract.manifest import GOLDEN, MANIFEST_NAME, FileEntry, Manifest
from forge_station.contract.views import DIFFERENCE
from forge_station.errors import InputError
from forge_station.geometry import reference_io
from forge_station.vlm import recorded
from forge_station.vlm.grammar import columns
from forge_station.vlm.model import DECODER, EMBED, IMAGE_TOKEN, TOKENIZER, VISION
from forge_station.vlm.text import TextCodec

LINE = "line.yaml"
TRAINING_CARD = "training_card.json"
_JOB = "job.json"
_FULL_PRECISION: dict[str, Any] = {
    "precision": "fp32",
    "target": "cpu",
    "quantizer": "rtn",
    "calibration": None,
}
_EMBED_ROWS = 4096
_BYTES_PER_WEIGHT = {0: 4.0, 16: 2.0, 8: 1.13, 4: 0.63}


def write_bundle(
    checkpoint_folder: Path,
    out: Path,
    release: Release,
    *,
    replace: bool = False,
    progress: Callable[[str, int], object] = lambda _what, _steps: None,
    judge: Callable[[Path], Drift] | None = None,
    golden: Callable[[Path], object] | None = None,
) -> Manifest:
    """Write the folder `out`. Raises InputError; nothing is left behind on failure.

    `progress(what, steps)` is called after each piece of work; `steps_of` tells the total. A run
    that was killed leaves `<out>.partial`, with which the next one of the same release goes on.
    `judge` compares the finished folder with full precision and raises `Degraded`, after which the
    partial folder stays as well. `golden` puts the golden set into the finished folder, which then
    gets its final manifest.
    """
    bits = targets.bits_of(release.target, release.precision)
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
    points = {**card.get("thresholds", {}), **release.thresholds}
    record.read(Thresholds, points, "thresholds")  # no station opens a bundle with others
    line_name, inspected = check_line(release.line, codec)
    check_references(release.references, card, inspected)
    _check_quantizer(release, bits)
    folder = partial_of(out)
    _begin(folder, _job(checkpoint, release))
    try:
        _check_space(folder, checkpoint, network, bits)
        _write_files(checkpoint, network, codec, folder, release, progress)
        for source, name in ((release.line, LINE), (release.references, reference_io.FILE)):
            (folder / name).unlink(missing_ok=True)
            if source is not None:
                shutil.copyfile(source, folder / name)
        for name in GOLDEN:
            (folder / name).unlink(missing_ok=True)
        describe = partial(manifest_of, checkpoint, network, codec, card, line_name)
        found = None
        if judge is not None:
            # Not dated: a gate that goes on later finds the same bundle.
            _finish(folder, dataclasses.replace(release, created=""), card, describe, None)
            found = judge(folder)
        manifest = _finish(folder, release, card, describe, found)
        if golden is not None:
            golden(folder)
            manifest = _finish(folder, release, card, describe, found)
        progress("manifest", 1)
        (folder / _JOB).unlink()
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    except Degraded:
        raise
    except StationError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return manifest


def _finish(
    folder: Path,
    release: Release,
    card: Mapping[str, Any],
    describe: Callable[[Release, Mapping[str, FileEntry], Drift | None], Manifest],
    found: Drift | None,
) -> Manifest:
    """Write model card and manifest of the files in a folder."""
    draft = describe(release, {}, found)
    text = model_card.render(draft, card, release.evaluation, release.detectable, found)
    (folder / CARD).write_text(text, encoding="utf-8")
    own = (_JOB, MANIFEST_NAME)
    names = sorted(path.name for path in folder.iterdir() if path.name not in own)
    manifest = describe(release, {name: entry_of(folder / name) for name in names}, found)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return manifest


def steps_of(network: Network) -> int:
    """Pieces of work that `write_bundle` reports."""
    return network.text.layers + network.vision.depth + 2


def partial_of(out: Path) -> Path:
    """Where a bundle is written until it is complete."""
    return out.with_name(out.name + ".partial")


def _job(checkpoint: Checkpoint, release: Release) -> str:
    """What a partial folder was begun for: only the same job goes on with it."""
    calibration = release.calibration
    named = {
        "checkpoint": checkpoint.identity,
        "precision": release.precision,
        "target": release.target,
        "quantizer": release.quantizer,
        "calibration": entry_of(calibration).sha256 if calibration is not None else "",
    }
    return json.dumps(named, indent=1)


def _begin(partial: Path, job: str) -> None:
    path = partial / _JOB
    if path.is_file() and path.read_text(encoding="utf-8") == job:
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    path.write_text(job, encoding="utf-8")


def _write_files(
    checkpoint: Checkpoint,
    network: Network,
    codec: TextCodec,
    folder: Path,
    release: Release,
    progress: Callable[[str, int], object],
) -> None:
    """Graphs, table and tokenizer; what an interrupted run wrote whole is left as it is."""
    target = TARGETS[release.target]
    bits = target.precisions[release.precision]
    vision, decoder = _weights(checkpoint, network)
    if (folder / VISION).exists():
        progress("vision", network.vision.depth)
    else:
        write_vision(
            checkpoint,
            network.vision,
            folder / VISION,
            storage(bits.vision, vision, half=target.half),
            lambda: progress("vision", 1),
            fused=target.fused,
        )
    if not (folder / EMBED).exists():
        write_embed(checkpoint, network, folder / EMBED, np.float16 if bits.decoder else np.float32)
    shutil.copyfile(checkpoint.folder / TOKENIZER, folder / TOKENIZER)
    progress("embeddings", 1)
    if (folder / DECODER).exists():
        progress("decoder", network.text.layers)
        return
    write_decoder(
        checkpoint,
        network.text,
        folder / DECODER,
        storage(bits.decoder, decoder, half=target.half),
        lambda: progress("decoder", 1),
        _quantizer(checkpoint, network, codec, folder, release),
        fused=target.fused,
    )


def _quantizer(
    checkpoint: Checkpoint, network: Network, codec: TextCodec, folder: Path, release: Release
) -> Quantizer:
    if release.quantizer == "hqq":
        return Nearest(hqq_scales)
    if release.quantizer == "rtn" or release.calibration is None:
        return Nearest()
    from export.gptq import Gptq  # needs torch, which plain exports do without

    questions = recorded.load(release.calibration)
    files = (folder / EMBED, folder / VISION)
    found = sequences(questions, codec, *files, network.vision.geometry)
    return Gptq(checkpoint, network.text, found)


def write_embed(
    checkpoint: Checkpoint, network: Network, path: Path, dtype: type[np.floating[Any]]
) -> None:
    """The embedding table as .npy [vocabulary, hidden]; a station maps it into memory."""
    shape = (network.text.vocab_size, network.text.hidden_size)
    name = f"{PREFIX}embed_tokens.weight"
    begun = path.with_name(f"{path.name}.begun")
    target = np.lib.format.open_memmap(begun, mode="w+", dtype=dtype, shape=shape)
    for start in range(0, shape[0], _EMBED_ROWS):
        rows = slice(start, min(start + _EMBED_ROWS, shape[0]))
        target[rows] = checkpoint.read(name, shape, rows)
    target.flush()
    begun.rename(path)


def _check_quantizer(release: Release, bits: Bits) -> None:
    if release.quantizer not in QUANTIZERS:
        raise InputError("quantizer", expected=", ".join(QUANTIZERS), got=release.quantizer)
    if release.quantizer != "rtn" and bits.decoder != 4:
        raise InputError(
            "this quantizer is for 4-bit weights",
            which=f"--quantizer {release.quantizer}",
            expected="--precision w4a16",
            got=release.precision,
        )
    calibrated = release.quantizer == "gptq"
    if calibrated != (release.calibration is not None):
        raise InputError(
            "gptq takes a calibration file, and nothing else does",
            which="--calibration",
            expected="a file of recorded questions" if calibrated else "none",
            got=release.calibration or "none",
            action="make it: python -m training.questions --bundle B --cases C --out questions.npz",
        )


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


def check_line(path: Path | None, codec: TextCodec) -> tuple[str, frozenset[str]]:
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


def check_references(path: Path | None, card: Mapping[str, Any], inspected: frozenset[str]) -> None:
    """A model that compares needs a reference of every part whose surface the line inspects."""
    known = frozenset(reference_io.load(path)) if path is not None else frozenset()
    lacking = sorted(inspected - known)
    if DIFFERENCE in surface_channels(card) and lacking:
        raise InputError(
            "parts without a reference",
            which=path or "--references",
            expected=f"a reference of {', '.join(lacking)}",
            got=f"{len(known)} references" if path else "none",
            action="make them: python -m training.references --line LINE --out references.npz",
        )


def _check_space(folder: Path, checkpoint: Checkpoint, network: Network, bits: Bits) -> None:
    """Refuse early when the disk cannot hold the bundle (weights, table and a tenth more)."""
    table = network.text.vocab_size * network.text.hidden_size
    vision, decoder = _weights(checkpoint, network)
    needed = decoder * _BYTES_PER_WEIGHT[bits.decoder] + vision * _BYTES_PER_WEIGHT[bits.vision]
    needed = 1.1 * (needed + table * (2 if bits.decoder else 4))
    there = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free + there
    if free < needed:
        raise InputError(
            "not enough disk space for the bundle",
            which=folder.parent,
            expected=f"{needed / 1e6:.0f} MB",
            got=f"{free / 1e6:.0f} MB free",
        )


def _weights(checkpoint: Checkpoint, network: Network) -> tuple[int, int]:
    """Numbers of weights in (vision graph, decoder graph with lm_head)."""
    counts = {name: int(np.prod(checkpoint.shape(name))) for name in checkpoint.names()}
    vision = sum(count for name, count in counts.items() if name.startswith("model.visual."))
    table = network.text.vocab_size * network.text.hidden_size
    return vision, sum(counts.values()) - vision - (0 if network.text.tied else table)


def entry_of(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise InputError("file cannot be read", which=path, got=error.strerror) from error
    return FileEntry(digest.hexdigest(), path.stat().st_size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder training wrote")
    parser.add_argument("--out", type=Path, required=True, help="bundle folder to write")
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
    parser.add_argument(
        "--golden",
        type=Path,
        metavar="CASES",
        help="folder with cases.jsonl: some of them, and what the bundle says, become the golden "
        "set that each station judges on its own device before the bundle is used",
    )
    parser.add_argument(
        "--golden-count", type=int, default=12, metavar="N", help="cases in it (default 12)"
    )
    parser.add_argument("--replace", action="store_true", help="replace an existing bundle")
    how = parser.add_argument_group("where it runs, and how weights are kept")
    how.add_argument("--target", choices=list(TARGETS), default="cpu", help="default cpu")
    how.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="int8",
        help="of the weights (default int8); w4a16: 4 bits in the decoder. "
        + "; ".join(f"{t.name}: {', '.join(t.precisions)}" for t in TARGETS.values()),
    )
    how.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        default="rtn",
        help="of 4-bit weights: round to nearest, fit the scales, or calibrate (default rtn)",
    )
    how.add_argument(
        "--calibration",
        type=Path,
        metavar="NPZ",
        help="what gptq calibrates with (python -m training.questions)",
    )
    gates = parser.add_argument_group("gate: verdicts of the bundle against those of fp32")
    gates.add_argument("--gate", type=Path, metavar="CASES", help="folder with cases.jsonl")
    gates.add_argument(
        "--gate-references",
        default="bundle",
        metavar="bundle|cad|none|FILE",
        help="references of surfaces, as for training.evaluate",
    )
    gates.add_argument(
        "--accept-degraded",
        default="",
        metavar="REASON",
        help="write the bundle although it is over a limit; the model card gives the reason",
    )
    return parser


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.accept_degraded and args.gate is None:
        parser.error("--accept-degraded needs --gate: what is accepted must be measured")
    begun = time.perf_counter()
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        release = Release(
            name=args.name or args.out.name,
            version=args.version,
            release_counter=args.release,
            precision=args.precision,
            target=args.target,
            quantizer=args.quantizer,
            calibration=args.calibration,
            layout=args.layout,
            line=args.line,
            references=args.references,
            evaluation=_json_object(args.evaluation),
            detectable=tuple(_json_object(path) for path in args.pod),
            thresholds=_json_object(args.thresholds),
            created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        if (partial_of(args.out) / _JOB).is_file():
            print(f"export.bundle: found {partial_of(args.out)}", file=sys.stderr)
        if args.golden is not None:
            _check_cases(args.golden)
        judge = None
        if args.gate is not None:
            _check_cases(args.gate)
            full = dataclasses.replace(release, **_FULL_PRECISION)
            judge = Gate(
                lambda folder: _write(args, folder, full, None),
                args.gate,
                args.out.with_name(args.out.name + ".gate"),
                _name_of_full(args.checkpoint, full),
                references=args.gate_references,
                accepted=args.accept_degraded,
            ).judge
        manifest = _write(args, args.out, release, judge)
    except StationError as error:
        print(f"export.bundle: {error}", file=sys.stderr)
        return 1
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    summary = {
        "bundle": str(args.out),
        "sha256": manifest.sha256,
        "target": args.target,
        "precision": manifest.precision,
        "bytes": sum(sizes.values()),
        "seconds": round(time.perf_counter() - begun, 1),
        **({"drift": manifest.training["drift"]} if "drift" in manifest.training else {}),
    }
    print(json.dumps(summary))
    return 0


def _name_of_full(checkpoint: Path, full: Release) -> str:
    """`full-` and a digest of all that it is made from."""
    files = [path for path in (full.line, full.references) if path is not None]
    parts = [_job(Checkpoint(checkpoint), full), *(entry_of(path).sha256 for path in files)]
    parts.append(json.dumps(dict(full.thresholds), sort_keys=True))
    return f"full-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _write(
    args: argparse.Namespace,
    out: Path,
    release: Release,
    judge: Callable[[Path], Drift] | None,
) -> Manifest:
    with tqdm(total=steps_of(read_network(args.checkpoint)), desc=out.name, unit="step") as bar:

        def advance(what: str, steps: int) -> None:
            bar.set_postfix_str(what)
            bar.update(steps)

        again = args.replace or out != args.out
        golden = None
        if args.golden is not None and out == args.out:
            golden = partial(golden_set.write, cases=args.golden, count=args.golden_count)
        return write_bundle(
            args.checkpoint, out, release,
            replace=again, progress=advance, judge=judge, golden=golden,
        )  # fmt: skip


def _check_cases(folder: Path) -> None:
    """Before anything is written: gate and golden set have something to look at."""
    path = folder / "cases.jsonl"
    if not path.is_file() or not path.stat().st_size:
        raise InputError(
            "no cases for the gate",
            which=path,
            expected="one JSON object a line",
            got="an empty file" if path.is_file() else "no such file",
            action="make them: python -m training.cases --out DIR",
        )


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
