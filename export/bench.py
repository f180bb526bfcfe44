"""Time a part with three checks against other ways to run the same model, in one run.

    python -m export.bench --bundle station_config/demo/bundle --checkpoint .work/checkpoints/nano
    python -m export.bench --bundle DIR --threads 4 --rounds 9         # without transformers

A part: a marks sheet of a kit that is read and judged as an assembly (two questions), and a surface
picture of three views with class, score and defect grid; three of them, whose answers differ in
length (`export.bench_parts`). The peers answer the same three questions the usual way, each with
its own prompt, by free greedy generation of as many tokens as the station's answers have (so that
no peer gains by stopping early; no closer look, which no peer has):

    station       this code: one picture prefix, options scored, rows as parallel branches
    naive         the same ONNX graphs: picture and prompt once a question, one token a pass
    transformers  the checkpoint in float32, eager attention, `generate` with its cache

Every round runs all of them in turn on every part, twice, and times the second run; a ratio is the
median of the quotients within a round and part, which a machine that others use as well disturbs
least. Wall time counts; CPU time stands beside it.

Against the limits of this machine, measured in the same run: reading speed of memory for decoding
one token (all weights are read), and the speed of a float32 matrix product in ONNX Runtime for the
picture and the prompt (two operations a weight and token; attention is not counted). A model that
fits into the cache may exceed the speed of memory.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tqdm import tqdm

from export.bench_parts import KIT, SURFACES, Part, parts_of
from forge_station import checks
from forge_station.checks import Thresholds
from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.contract.spec import Product
from forge_station.contract.views import MARKS, Layout
from forge_station.errors import InputError
from forge_station.geometry import sheet
from forge_station.geometry.gauge import Size
from forge_station.vlm.decode import Cache
from forge_station.vlm.engine import CPU, VERSION, Graph
from forge_station.vlm.model import DECODER, VISION, VisionLanguageModel

PRODUCT = Product("KIT", "assembly", ("assembly",), dict.fromkeys(KIT, 1))
_LEAST_WEIGHT = 4096


@dataclass(frozen=True)
class Question:
    """A prompt with one picture, and how many tokens its answer has, the end included."""

    picture: NDArray[np.uint8]
    prompt: str
    tokens: int


class Naive(VisionLanguageModel):
    """A plain text model on the sessions of the given one: everything again for every question."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.__dict__.update(model.__dict__)
        self._prefix = ("", self._empty)

    def _step(self, *feeds: Any) -> tuple[NDArray[np.float32], Cache]:
        logits, cache = super()._step(*feeds)
        self._said = logits
        return logits, cache

    def answer_all(self, questions: Sequence[Question]) -> list[list[int]]:
        return [self.answer(question) for question in questions]

    def answer(self, question: Question) -> list[int]:
        """Picture and prompt, then one token a pass, the likeliest of the whole vocabulary."""
        trunk = self.trunk([question.picture], question.prompt)
        cache: Cache = trunk.cache
        found = [int(self._said[-1].argmax())]
        while len(found) < question.tokens:
            place = len(found) - 1
            _, cache = self._step(
                self._lookup(np.array(found[-1:])),
                np.full((3, 1, 1), trunk.position + place, np.int64),
                np.zeros((1, 1, 1, trunk.length + place + 1), np.float32),
                cache,
                np.array([0]),
            )
            found.append(int(self._said[-1].argmax()))
        return found


def station(
    model: VisionLanguageModel, part: Part, sizes: Mapping[str, Size], limits: Thresholds
) -> tuple[checks.MarksRead, checks.Judged, checks.SurfaceRead]:
    """All three checks as the station makes them: the grid only where the surface looks bad."""
    read = checks.read_marks(model, part.marks, sizes, {})
    judged = checks.judge_marks(model, read, PRODUCT)
    found = checks.read_surface(
        model, part.surface, MARKS[0], KIT[0], sizes[MARKS[0]], limits, 3600.0
    )
    return read, judged, found


def questions_of(
    model: VisionLanguageModel, part: Part, sizes: Mapping[str, Size], limits: Thresholds
) -> list[Question]:
    """What the station asks of a part, as three prompts, and the length of what it answered."""
    read, judged, found = station(model, part, sizes, limits)
    box = {mark: size.box for mark, size in sizes.items()}
    marks = checks.trunk_text(tasks.sheet_facts(box, part.marks.mm_per_px))
    readings = tasks.readings_text({part.mark: part.part for part in read.parts})
    judge = marks + readings + tasks.NEXT_USER
    judge += tasks.judge_text("assembly", dict(PRODUCT.parts)) + tasks.ASSISTANT
    opinion = f"{tasks.ANSWER_KEY} {judged.letter}\n{tasks.MISSING_KEY} {judged.missing}\n"
    opinion += f"{tasks.SCORE_KEY} {tasks.SCORES[round(judged.score)]}\n"
    looking = checks.trunk_text(tasks.surface_facts(KIT[0], sizes[MARKS[0]].box))
    score = tasks.SCORES[round(found.reading.score or 0.0)]
    look = f"{tasks.CLASS_KEY} {found.reading.defect_class}\n{tasks.SCORE_KEY} {score}\n"
    look += _grid_lines(found.grids)
    return [
        _question(model, part.marks, marks, readings),
        _question(model, part.marks, judge, opinion),
        _question(model, part.surface, looking, look),
    ]


def _grid_lines(grids: Sequence[Any]) -> str:
    """`front r5: 5,6` for every row that is not empty."""
    rows: dict[tuple[str, int], list[int]] = {}
    for grid in grids:
        for row, column in grid.cells:
            rows.setdefault((grid.view, row), []).append(column)
    return "".join(
        f"{tasks.row_key(*key)} {tasks.row_text(found)}\n" for key, found in rows.items()
    )


def _question(
    model: VisionLanguageModel, picture: sheet.Sheet, prompt: str, answer: str
) -> Question:
    return Question(picture.image, prompt, len(model.codec.encode(answer)) + 1)


Answers = Callable[[Sequence[Question]], list[list[int]]]
"""The tokens that a peer answers each question with."""


def transformers_peer(checkpoint: Path, model: VisionLanguageModel, threads: int) -> Answers:
    """`generate` of the checkpoint, eager, in float32 -> the tokens of each answer."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from forge_station.vlm.preprocess import normalised_patches

    torch.set_num_threads(threads)
    eager = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def answer(questions: Sequence[Question]) -> list[list[int]]:
        answers = []
        for question in questions:
            image, geometry = question.picture, model.geometry
            before, after = question.prompt.split(tasks.IMAGE_TOKEN)
            rows, columns = geometry.token_grid(*image.shape[:2])
            ids = [*model.codec.encode(before), *[model.image_token] * (rows * columns)]
            tokens = torch.tensor([ids + model.codec.encode(after)])
            with torch.no_grad():
                whole = eager.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    pixel_values=torch.from_numpy(normalised_patches(image, geometry)),
                    image_grid_thw=torch.tensor([[1, *geometry.grid(*image.shape[:2])]]),
                    mm_token_type_ids=(tokens == model.image_token).int(),
                    max_new_tokens=question.tokens,
                    min_new_tokens=question.tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            answers.append(whole[0, tokens.shape[1] :].tolist())
        return answers

    return answer


def not_run(checkpoint: Path | None) -> dict[str, str]:
    """Peers that this run leaves out, and why."""
    reasons = {}
    if checkpoint is None:
        reasons["transformers"] = "no --checkpoint was given"
    for name, module, converter in (
        ("OpenVINO GenAI", "openvino_genai", "optimum-intel (with transformers below 5)"),
        ("llama.cpp", "llama_cpp", "its own converter to GGUF"),
    ):
        missing = importlib.util.find_spec(module) is None
        reasons[name] = (
            f"{'not installed, and ' if missing else ''}it reads neither these graphs nor this "
            f"checkpoint before {converter} has converted them, in an environment of its own"
        )
    return reasons


Times = Mapping[str, Sequence[tuple[float, float]]]
"""Peer -> (wall, CPU) milliseconds of every round."""


def race(works: Mapping[str, Mapping[str, Callable[[], object]]], rounds: int) -> dict[str, Times]:
    """Part -> peer -> work; all in turn, each twice, of which the second time counts.

    The first one finds the caches as the peer before left them: with a smaller model that is half
    of the time, and falls on whoever comes after the largest peer.
    """
    times = {
        part: {peer: list[tuple[float, float]]() for peer in own} for part, own in works.items()
    }
    for _ in tqdm(range(rounds), unit="round"):
        for part, peers in works.items():
            for peer, work in peers.items():
                work()
                start, spent = time.perf_counter(), time.process_time()
                work()
                took = (time.perf_counter() - start, time.process_time() - spent)
                times[part][peer].append((took[0] * 1000, took[1] * 1000))
    return dict(times)


def figures(parts: Sequence[Times], base: str = "station") -> dict[str, dict[str, float]]:
    """Medians over rounds and parts: of milliseconds, and of each peer's time over `base`'s."""
    found: dict[str, dict[str, float]] = {}
    for kind, ratio, k in (
        ("median_ms", "times_faster", 0),
        ("median_cpu_ms", "times_less_cpu", 1),
    ):
        own = {peer: [row[k] for part in parts for row in part[peer]] for peer in parts[0]}
        found[kind] = {peer: round(statistics.median(rows), 1) for peer, rows in own.items()}
        found[ratio] = {
            peer: round(statistics.median(a / b for a, b in zip(rows, own[base], strict=True)), 2)
            for peer, rows in own.items()
            if peer != base
        }
    return found


def read_speed(threads: int, mega_bytes: int = 192) -> float:
    """GB/s of reading memory with so many threads: the best of five sums over large arrays."""
    arrays = [np.ones(mega_bytes * 2**17, np.float64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.sum, arrays))
            best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - start))
    return best / 1e9


def product_speed(threads: int, side: int = 768) -> float:
    """GFLOP/s of a float32 matrix product in ONNX Runtime, the best of five."""
    shape = [side, side]
    tensor = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("a", "b", "y")]
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    graph = helper.make_graph([node], "product", tensor[:2], tensor[2:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.onnx"
        onnx.save(proto, path)
        opened = Graph(path, threads=threads, provider=CPU)
        feeds = {name: np.ones(shape, np.float32) for name in ("a", "b")}
        best = _best(lambda: opened.run(feeds))
    return float(2 * side**3 / best / 1e9)


def weights_of(path: Path) -> tuple[int, int]:
    """(numbers in the weight matrices, bytes of all weights) of a graph with weights beside it."""
    graph = onnx.load(path, load_external_data=False).graph
    packed = [node for node in graph.node if node.op_type == "MatMulNBits"]
    numbers = 0
    for node in packed:
        size = {item.name: item.i for item in node.attribute}
        numbers += size["K"] * size["N"]
    inside = {name for node in packed for name in node.input}
    for item in graph.initializer:
        count = int(np.prod(item.dims))
        matrix = len(item.dims) == 2 or item.data_type == TensorProto.UINT8  # blocks of int8
        if matrix and count >= _LEAST_WEIGHT and item.name not in inside:
            numbers += count
    beside = path.with_name(f"{path.name}.data")
    return numbers, beside.stat().st_size if beside.is_file() else path.stat().st_size


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _best(work: Callable[[], object], most: int = 9, enough_s: float = 20.0) -> float:
    """Seconds of the quickest of so many runs; of long ones, such as those of 3B, two must do."""
    took = [_timed(work), _timed(work)]
    while len(took) < most and sum(took) < enough_s:
        took.append(_timed(work))
    return min(took)


def limits(bundle: Path, model: VisionLanguageModel, part: Part, threads: int) -> dict[str, Any]:
    """Speed of each pass against what the machine can do at best."""
    memory, products = read_speed(threads), product_speed(threads)
    image = part.surface.image
    picture_tokens = int(np.prod(model.geometry.token_grid(*image.shape[:2])))
    patches = picture_tokens * model.geometry.merge**2
    prompt = checks.trunk_text(tasks.surface_facts(KIT[0], (30.0, 13.0, 7.0)))
    trunk = model.trunk([image], prompt)
    vision_weights, _ = weights_of(bundle / VISION)
    decoder_weights, decoder_bytes = weights_of(bundle / DECODER)
    token = [model.codec.encode(tasks.CLASS_KEY)[:1]]
    vision = _best(lambda: model.embed_images([image]))
    both = _best(lambda: model.trunk([image], prompt))
    decode = _best(lambda: model.forward(trunk, token))
    prefill = max(both - vision, 1e-9)
    found = {
        "memory_read_gb_s": memory,
        "matrix_product_gflop_s": products,
        "vision_ms": vision * 1000,
        "vision_gflop_s": 2 * vision_weights * patches / vision / 1e9,
        "prefill_ms": prefill * 1000,
        "prefill_gflop_s": 2 * decoder_weights * trunk.length / prefill / 1e9,
        "decode_ms": decode * 1000,
        "decode_gb_s": decoder_bytes / decode / 1e9,
    }
    found["vision_share"] = found["vision_gflop_s"] / products
    found["prefill_share"] = found["prefill_gflop_s"] / products
    found["decode_share"] = found["decode_gb_s"] / memory
    return {name: round(value, 3) for name, value in found.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one run."""
    with VisionLanguageModel.open(
        args.bundle,
        threads=args.threads,
        provider=CPU,
        prefix=tasks.TRUNK_OPEN + tasks.IMAGE_OPEN,
    ) as model:
        sides = model.manifest.model
        layout = Layout(
            cell=int(sides.get("cell_px", Layout.cell)),
            panel=int(sides.get("panel_px", Layout.panel)),
        )
        thresholds = Thresholds.read(model.manifest.thresholds)
        drawn = parts_of(layout, model.manifest.surface_channels)
        parts = {name: drawn[name] for name in args.part or drawn}
        answers: dict[str, Answers] = {"naive": Naive(model).answer_all}
        if args.checkpoint is not None:
            answers["transformers"] = transformers_peer(args.checkpoint, model, args.threads)
        works: dict[str, dict[str, Callable[[], object]]] = {}
        tokens = {}
        for name, part in parts.items():
            sizes = checks.measured(part.clouds)
            asked = questions_of(model, part, sizes, thresholds)
            tokens[name] = [question.tokens for question in asked]
            works[name] = {"station": partial(station, model, part, sizes, thresholds)}
            works[name] |= {peer: partial(answer, asked) for peer, answer in answers.items()}
        times = race(works, args.rounds)
        return {
            "bundle": f"{model.manifest.name} {model.manifest.version}",
            "precision": model.manifest.precision,
            "runtime": f"onnxruntime {VERSION}",
            "threads": args.threads,
            "load": [round(value, 1) for value in os.getloadavg()],
            "rounds": args.rounds,
            "answer_tokens": tokens,
            "parts": {name: figures([own]) for name, own in times.items()},
            "all": figures(list(times.values())),
            "limits": limits(args.bundle, model, drawn["sound"], args.threads),
            "not_run": not_run(args.checkpoint),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        f"{found['bundle']} ({found['precision']}), {found['runtime']}, {found['threads']} threads",
        f"load {found['load'][0]}",
        f"{'part':<11}{'tokens':<14}{'peer':<14}{'median ms':>11}{'CPU ms':>10}{'station is':>13}"
        f"{'by CPU time':>13}",
    ]
    for part, own in [*found["parts"].items(), ("all", found["all"])]:
        said = "+".join(map(str, found["answer_tokens"].get(part, [])))
        for name, value in own["median_ms"].items():
            line = (
                f"{part:<11}{said:<14}{name:<14}{value:>11.1f}{own['median_cpu_ms'][name]:>10.1f}"
            )
            if name in own["times_faster"]:
                line += f"{own['times_faster'][name]:>12.2f}x{own['times_less_cpu'][name]:>12.2f}x"
            lines.append(line)
            part = said = ""
    lines += [f"{name}: not run: {reason}" for name, reason in found["not_run"].items()]
    own = found["limits"]
    lines += [
        f"{'against the limit':<20}{'ms':>8}{'reached':>18}{'limit':>18}{'share':>8}",
        *(
            f"{name:<20}{own[f'{name}_ms']:>8.1f}{own[f'{name}_{unit}']:>12.1f} {said:<5}"
            f"{own[limit]:>12.1f} {said:<5}{own[f'{name}_share']:>8.2f}"
            for name, unit, said, limit in (
                ("vision", "gflop_s", "GF/s", "matrix_product_gflop_s"),
                ("prefill", "gflop_s", "GF/s", "matrix_product_gflop_s"),
                ("decode", "gb_s", "GB/s", "memory_read_gb_s"),
            )
        ),
        f"peak memory of all together {found['peak_memory_mb']} MB",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle folder")
    parser.add_argument("--checkpoint", type=Path, help="its checkpoint, for transformers")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument(
        "--part",
        action="append",
        choices=tuple(SURFACES),
        help="only this one, for large models; may be given again (default: all)",
    )
    args = parser.parse_args()
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds: expected 1 or more")
    try:
        if args.checkpoint is not None and not args.checkpoint.is_dir():
            raise InputError("no such checkpoint folder", which=args.checkpoint)
        found = run(args)
    except StationError as error:
        print(f"export.bench: {error}", file=sys.stderr)
        return 1
    print(table(found))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
