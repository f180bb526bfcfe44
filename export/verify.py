"""Does a bundle compute and answer what its checkpoint does? Torch, graphs, verdicts.

    python -m export.verify --checkpoint runs/nano --bundle station_config/demo/bundle
    python -m export.verify --checkpoint runs/nano --bundle B --cases .work/cases --references cad
    python -m export.verify --rows full.jsonl quantised.jsonl

Torch against graphs: random pictures of the bundle's sizes (and a ragged one), random facts, all
branches of both checks, compared with transformers in float32; a float32 bundle must agree within
`--limit`. With --cases also full precision against the bundle, over the whole path from scan to
verdict: verdicts that flip, readings that change, grids and scores that differ (`export.drift` has
the limits; `export.bundle --gate` is the same before a bundle is written). --rows compares two
files that `training.evaluate` wrote. The exit code is 1 over a limit. The last line of the output
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.bundle import LINE, write_bundle
from export.drift import Drift, read_rows
from export.drift import compare as compare_rows
from export.gate import Gate
from export.reference import Reference
from export.release import Release
from export.tensors import Checkpoint
from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.error import StationError
from forge_station.contract.views import MARKS
from forge_station.geometry import reference_io
from forge_station.vlm.bundle_files import read_manifest
from forge_station.vlm.decode import Branch, BranchResult
from forge_station.vlm.model import Trunk, VisionLanguageModel

Image = NDArray[np.uint8]


@dataclass(frozen=True)
class Agreement:
    """How far two arrays are apart; `top1` is the share of rows with the same largest entry."""

    what: str
    max_diff: float
    relative_l2: float
    top1: float
    reference_std: float

    @classmethod
    def of(cls, what: str, got: NDArray[Any], reference: NDArray[Any]) -> Agreement:
        gap = got.astype(np.float64) - reference
        return cls(
            what,
            float(np.abs(gap).max()),
            float(np.linalg.norm(gap)) / max(float(np.linalg.norm(reference)), 1e-30),
            float((got.argmax(-1) == reference.argmax(-1)).mean()),
            float(reference.std()),
        )


@dataclass(frozen=True)
class Case:
    """A trunk with its branches, as a check asks them."""

    name: str
    images: tuple[Image, ...]
    text: str
    branches: tuple[Branch, ...]


def sheet_case(model: VisionLanguageModel, image: Image, marks: str = MARKS[:5]) -> Case:
    """A marks sheet with a branch a mark."""
    sizes = {mark: (20.0 + n, 13.0, 6.8) for n, mark in enumerate(marks)}
    grammar = model.options_grammar([part.id for part in CATALOGUE])
    text = trunk_text(tasks.sheet_facts(sizes, 0.35))
    branches = tuple(Branch(tasks.mark_key(mark), grammar) for mark in marks)
    return Case("sheet", (image,), text, branches)


def surface_case(model: VisionLanguageModel, image: Image) -> Case:
    """A surface picture: class, score and the 48 grid rows."""
    text = trunk_text(tasks.surface_facts(CATALOGUE[0].id, (20.0, 13.0, 6.8)))
    rows = model.columns_grammar()
    branches = [
        Branch(tasks.CLASS_KEY, model.options_grammar(tasks.SURFACE_CLASSES)),
        Branch(tasks.SCORE_KEY, model.options_grammar(tasks.SCORES)),
        *(Branch(tasks.row_key(view, row), rows) for view, row in tasks.ROW_KEYS),
    ]
    return Case("surface", (image,), text, tuple(branches))


def trunk_text(facts: str, images: int = 1) -> str:
    """System, pictures, facts, and the turn of the assistant."""
    pictures = (tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE) * images
    return tasks.TRUNK_OPEN + pictures + facts + tasks.ASSISTANT


def random_image(rng: np.random.Generator, size: Sequence[int]) -> Image:
    """uint8 [H, W, 3]: blocks of flat colour, nearer to a picture than white noise is."""
    high, wide = size
    blocks = rng.integers(0, 256, (-(-high // 14), -(-wide // 14), 3))
    return blocks.repeat(14, 0).repeat(14, 1)[:high, :wide].astype(np.uint8)


def compare(
    model: VisionLanguageModel, reference: Reference, case: Case
) -> tuple[list[Agreement], float]:
    """Embeddings, packed logits, and the decoded strings' log-probabilities read alone."""
    embeds = np.concatenate(model.embed_images(case.images))
    expected = np.concatenate(reference.image_embeds(case.images))
    trunk = model.trunk(case.images, case.text)
    results = model.decode_branches(trunk, case.branches)
    fed = [(*model.codec.encode(r.key), *r.tokens) for r in results]
    ours = model.forward(trunk, fed)
    theirs = reference.packed_logits(case.images, trunk.ids, fed)
    alone = [reference.alone_logits(case.images, trunk.ids, segment) for segment in fed[:6]]
    found = [
        Agreement.of(f"{case.name} image embeddings", embeds, expected),
        Agreement.of(f"{case.name} packed logits", np.concatenate(ours), np.concatenate(theirs)),
        Agreement.of(
            f"{case.name} branches read alone", np.concatenate(ours[:6]), np.concatenate(alone)
        ),
    ]
    gaps = [
        abs(result.logprob - string_logprob(branch, result, logits, len(segment)))
        for branch, result, logits, segment in zip(case.branches, results, theirs, fed, strict=True)
    ]
    return found, max(gaps)


def string_logprob(
    branch: Branch, result: BranchResult, logits: NDArray[np.float32], length: int
) -> float:
    """Log-probability of a decoded string from teacher-forced logits [length, V], step by step."""
    grammar, total, state = branch.grammar, 0.0, 0
    at = length - len(result.tokens) + len(grammar.opening)
    while at < length:
        row = logits[at - 1, grammar.vocabulary].astype(np.float64) + grammar.mask[state]
        column = grammar.index[result.tokens[at - length]]
        total += float(row[column] - np.log(np.exp(row - row.max()).sum()) - row.max())
        run, state = grammar.steps[state, column]
        at += 1 + len(run)
    return total


def timings(model: VisionLanguageModel, case: Case, repeats: int) -> dict[str, float]:
    """Milliseconds p50 of vision, trunk (with vision), branches and their passes."""
    trunk = model.trunk(case.images, case.text)

    def p50(work: Callable[[], object]) -> float:
        work()
        spans = []
        for _ in range(repeats):
            begun = time.perf_counter()
            work()
            spans.append(time.perf_counter() - begun)
        return round(1e3 * float(np.median(spans)), 2)

    return {
        "vision_ms": p50(lambda: model.embed_images(case.images)),
        "trunk_ms": p50(lambda: model.trunk(case.images, case.text)),
        "branches_ms": p50(lambda: model.decode_branches(trunk, case.branches)),
        "trunk_tokens": trunk.length,
        "branches": len(case.branches),
        "passes": model.stats.passes,
        "branch_tokens": model.stats.tokens,
    }


def verify(
    checkpoint: Path, bundle: Path, *, threads: int, repeats: int, limit: float
) -> dict[str, Any]:
    """All comparisons and timings; prints the table. `ok` is False when float32 disagrees."""
    rng = np.random.default_rng(0)
    with VisionLanguageModel.open(bundle, threads=threads) as model:
        reference = Reference(checkpoint, model.geometry)
        images = {name: random_image(rng, size) for name, size in model.manifest.images.items()}
        cases = [sheet_case(model, images["sheet"]), surface_case(model, images["surface"])]
        ragged = random_image(rng, (140, 196))
        two = Case(
            "two pictures",
            (images["sheet"], ragged),
            trunk_text(tasks.sheet_facts({"A": (20.0, 13.0, 6.8)}, 0.35), 2),
            cases[0].branches[:1],
        )
        agreements: list[Agreement] = []
        gap = 0.0
        for case in (*cases, two):
            found, string_gap = compare(model, reference, case)
            agreements += found
            gap = max(gap, string_gap)
        positions = positions_agree(model, reference, two)
        speed = {case.name: timings(model, case, repeats) for case in cases}
        exact = model.manifest.precision == "fp32"
        provider = model.provider
    worst = max(item.max_diff for item in agreements)
    print(f"{'':32s} {'max diff':>10s} {'rel L2':>10s} {'top-1':>7s} {'ref std':>8s}")
    for item in agreements:
        print(
            f"{item.what:32s} {item.max_diff:10.2e} {item.relative_l2:10.2e} "
            f"{item.top1:7.3f} {item.reference_std:8.2f}"
        )
    print(f"string log-probability, largest gap {gap:.2e}; positions agree: {positions}")
    for name, figures in speed.items():
        print(name, "  ".join(f"{key} {value}" for key, value in figures.items()))
    return {
        "precision": model.manifest.precision,
        "provider": provider,
        "threads": threads,
        "max_diff": worst,
        "string_gap": gap,
        "positions_agree": positions,
        "limit": limit if exact else None,
        "ok": positions and (not exact or max(worst, gap) <= limit),
        "agreement": {a.what: {"max": a.max_diff, "l2": a.relative_l2} for a in agreements},
        "timing": speed,
    }


def positions_agree(model: VisionLanguageModel, reference: Reference, case: Case) -> bool:
    from forge_station.vlm.preprocess import mrope_positions

    trunk: Trunk = model.trunk(case.images, case.text)
    grids = [model.geometry.token_grid(*image.shape[:2]) for image in case.images]
    ids = np.array(trunk.ids, np.int64)
    ours, _ = mrope_positions(ids, model.image_token, grids)
    return bool((ours == reference.trunk_positions(case.images, trunk.ids)).all())


def judge(checkpoint: Path, bundle: Path, cases: Path, references: str, work: Path) -> Drift:
    """Full precision against the bundle over cases; rows are kept in `work`."""
    manifest = read_manifest(bundle)
    line, own = bundle / LINE, bundle / reference_io.FILE
    full = Release(
        manifest.name,
        manifest.version,
        precision="fp32",
        line=line if line.is_file() else None,
        references=own if own.is_file() else None,
        thresholds=manifest.thresholds,
    )
    name = f"full-{Checkpoint(checkpoint).identity[:12]}"
    gate = Gate(
        lambda folder: write_bundle(checkpoint, folder, full),
        cases,
        work,
        name,
        references=references,
        accepted="measured only",
    )
    return gate.judge(bundle)


def shown(drift: Drift) -> bool:
    """Print the table and what is over a limit; True when nothing is."""
    print(f"{'against full precision':44s} {'value':40s} limit")
    for what, value, limit in drift.table():
        print(f"{what:44s} {value:40s} {limit}")
    for fault in drift.faults():
        print(f"over the limit: {fault}")
    return not drift.faults()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="folder training wrote")
    parser.add_argument("--bundle", type=Path, help="bundle folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="of each timing")
    parser.add_argument("--limit", type=float, default=1e-4, help="largest difference in fp32")
    parser.add_argument("--cases", type=Path, help="folder with cases.jsonl: compare verdicts too")
    parser.add_argument(
        "--references",
        default="bundle",
        metavar="bundle|cad|none|FILE",
        help="references of surfaces, as for training.evaluate",
    )
    parser.add_argument(
        "--work", type=Path, default=Path(".work/verify"), help="keeps the rows of --cases"
    )
    parser.add_argument(
        "--rows", type=Path, nargs=2, metavar=("FULL", "OWN"), help="compare two row files only"
    )
    args = parser.parse_args()
    if args.rows is None and (args.checkpoint is None or args.bundle is None):
        parser.error("give --checkpoint and --bundle, or --rows")
    try:
        if args.rows is not None:
            full, own = map(read_rows, args.rows)
            drift = compare_rows(full, own)
            figures: dict[str, Any] = {"ok": shown(drift), "drift": drift.to_dict()}
        else:
            figures = verify(
                args.checkpoint,
                args.bundle,
                threads=args.threads,
                repeats=args.repeats,
                limit=args.limit,
            )
        if args.rows is None and args.cases is not None:
            drift = judge(args.checkpoint, args.bundle, args.cases, args.references, args.work)
            figures["ok"] = shown(drift) and figures["ok"]
            figures["drift"] = drift.to_dict()
    except StationError as error:
        print(f"export.verify: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
