"""Held-out simulated cases, through the full decode path: mesh -> pattern images -> cloud.

    python -m training.cases --out .work/cases --task all --count 300 --seed 20261130 --jobs 1

Makes `--count` cases a task. Each is one tray of parts with fresh geometry (dimensions inside their
tolerance, chamfers, threads), resting where gravity puts them, seen by the simulated head from four
azimuths with two exposures, decoded and fused. Nothing of the training surrogate is used. Run
again, cases that exist are kept. CASES.md says what a case is.

    --workpieces hex_nut,cap_nut,flange_nut,wing_nut   a family of its own (or --without ...)
    --subset lookalike     the wrong part, if any, is one that is easily mixed up with the right one
    --references 1         a scan of what is right beside every case, for the setting `reference`
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from forge_station.capture.base import Cloud
from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, PartModel, by_id, of_workpiece
from forge_station.contract.spec import Product
from forge_station.contract.views import MARKS, VIEWS
from forge_station.geometry import pose, scene
from forge_station.sim import defects, fasteners, layout, rest_pose, scanner, trays
from forge_station.sim.finish import SMOOTH, Finish
from forge_station.sim.mesh import Mesh, sample_surface
from training.data.decoded import scan
from training.data.surface_samples import random_scale
from training.evaluation import lookalikes
from training.evaluation.case_files import FILE, TASKS, Case, CaseInput, Task, Truth, write_line
from training.evaluation.truth import Wrong, defect_flags, surface_truth, wrong

TRAINING_SEEDS = (0, 900000)
CLEAN_SHARE = 0.3
SURFACE_WORKPIECES = (
    "hex_bolt",
    "socket_cap_screw",
    "hex_nut",
    "flange_nut",
    "flat_washer",
    "pin",
)
"""Those the surface check is promised for; `training.synth` draws mostly these."""
KIT_FAULTS = ("complete", "missing", "extra", "wrong model", "wrong workpiece")
_TRIES = 40
# Marks go from left to right; parts whose places differ by less than this many camera pixels
# could change letters, so such trays are laid out again.
_ORDER_PX = 3.0


LOOKALIKE = "lookalike"


@dataclass(frozen=True)
class Draw:
    """What cases are drawn from. Cases of different draws have different ids."""

    workpieces: tuple[str, ...] = ()
    """Only these, also as wrong part; empty: all, for `surface` those it is promised for."""
    subset: str = ""
    """`lookalike`: the wrong part is one that is easily mixed up with the right one."""
    references: int = 0
    """How many scans of what is right come with a case."""
    parts: tuple[str, ...] = ()
    """Surfaces of these model numbers only."""
    clean: float = CLEAN_SHARE
    """Share of the surfaces without a defect."""
    finish: Finish = SMOOTH
    """Of the surfaces; another one than parts are trained with is a line that shifted."""

    @property
    def tag(self) -> str:
        """Part of the ids: empty for the plain draw, else a name or a digest of the choice."""
        words = [self.subset] if self.subset else []
        if self.workpieces:
            words.append(f"{zlib.crc32(','.join(sorted(self.workpieces)).encode()):08x}")
        own = (sorted(self.parts), self.clean, astuple(self.finish))
        if own != ([], CLEAN_SHARE, astuple(SMOOTH)):
            words.append(f"{zlib.crc32(repr(own).encode()):08x}")
        return "".join(f"-{word}" for word in words)


PLAIN = Draw()


@dataclass(frozen=True)
class Made:
    """A case and its data. `defect` bool [N]: which points of the cloud lie on the defect."""

    case: Case
    cloud: Cloud
    defect: NDArray[np.bool_] | None = None
    references: tuple[Cloud, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What lies on the tray, and what should."""

    parts: tuple[PartModel, ...]
    product: Product
    required: dict[str, int]


def case_id(task: Task, seed: int, number: int, draw: Draw = PLAIN) -> str:
    return f"{task}{draw.tag}-{seed}-{number:05d}"


def make_case(task: Task, seed: int, number: int, draw: Draw = PLAIN) -> Made:
    """The case `number` of a task; the same arguments give the same case."""
    rng = np.random.default_rng([seed, TASKS.index(task), number])
    name = case_id(task, seed, number, draw)
    if task == "surface":
        made = _surface_case(name, rng, draw)
    else:
        plan = plan_batch(rng, draw) if task == "workpiece" else plan_kit(rng, draw)
        made = _tray_case(name, task, plan, rng)
    if not draw.references and not draw.subset:
        return made
    apart = np.random.default_rng([seed, TASKS.index(task), number, 1])
    right = [by_id(part) for part, n in _right_parts(made.case).items() for _ in range(n)]
    scans = tuple(_tray_of(name, right, apart)[0] for _ in range(draw.references))
    files = tuple(scene_file(f"{name}-reference{k}") for k in range(len(scans)))
    given = replace(made.case.input, references=files)
    return replace(made, case=replace(made.case, input=given, subset=draw.subset), references=scans)


def _right_parts(case: Case) -> dict[str, int]:
    """What should lie on the tray; of a batch without an expected part the majority."""
    if case.product is not None and case.product.parts:
        return dict(case.product.parts)
    ((part, _),) = Counter(case.truth.readings.values()).most_common(1)
    return {part: len(case.truth.readings)}


def plan_batch(rng: np.random.Generator, draw: Draw = PLAIN) -> Plan:
    """3..6 equal parts, in half of the cases one of them another; expected part given in half."""
    part = _base(rng, draw)
    count = int(rng.integers(3, 7))
    parts = [part] * count
    if rng.random() < 0.5:
        same = bool(rng.random() < 0.6)
        parts[int(rng.integers(count))] = _other(part, rng, draw, same=same)
    given = bool(rng.random() < 0.5)
    product = Product(
        "BATCH",
        "batch",
        ("workpiece",),
        parts={part.id: count} if given else {},
        count=None if given else count,
    )
    return Plan(tuple(parts), product, {part.id: count})


def plan_kit(rng: np.random.Generator, draw: Draw = PLAIN) -> Plan:
    """A kit of 3..6 parts of one nominal size: complete, or with one fault."""
    faults = ("complete", "wrong model") if draw.subset else KIT_FAULTS
    fault = faults[int(rng.integers(len(faults)))]
    for _ in range(_TRIES):
        kit = _kit(int(rng.integers(3, 6 if fault == "extra" else 7)), rng, draw)
        on_tray = _with_fault(kit, fault, rng, draw)
        if on_tray is not None:
            required = dict(Counter(model.id for model in kit))
            product = Product("KIT", "assembly", ("assembly",), parts=required)
            return Plan(tuple(on_tray), product, required)
    raise RuntimeError(f"no kit with the fault {fault} in {_TRIES} tries")


def _kit(count: int, rng: np.random.Generator, draw: Draw) -> list[PartModel]:
    first = _base(rng, draw)
    pool = [m for m in trays.near_in_size(first, 1.05) if _allowed(m, draw)]
    kit = [first]
    while len(kit) < count:
        kit.append(kit[-1] if rng.random() < 0.25 else trays.spread(pool, rng))
    return kit


def _with_fault(
    kit: list[PartModel], fault: str, rng: np.random.Generator, draw: Draw
) -> list[PartModel] | None:
    """The kit with one fault made; None where this kit cannot have it."""
    parts = list(kit)
    chosen = int(rng.integers(len(parts)))
    same = fault == "wrong model"
    if fault == "missing":
        del parts[chosen]
    elif fault == "extra":
        repeated = rng.random() < 0.5
        same = bool(rng.random() < 0.6)
        other = _other(parts[chosen], rng, draw, same=same)
        parts.append(parts[chosen] if repeated else other)
    elif fault != "complete":
        if draw.subset:  # the first part of the kit is the one that has a look-alike
            chosen = 0
        parts[chosen] = _other(parts[chosen], rng, draw, same=same)
        if parts[chosen] in kit:
            return None
    return parts


def _base(rng: np.random.Generator, draw: Draw) -> PartModel:
    """The part that a tray is about; for look-alikes the ways to be alike are equally likely."""
    if not draw.subset:
        return _any_part(rng, draw.workpieces or WORKPIECES)
    pools = [lookalikes.bases(kind, draw.workpieces or WORKPIECES) for kind in lookalikes.KINDS]
    pools = [pool for pool in pools if pool]
    if not pools:
        raise SystemExit(f"no look-alikes among {', '.join(draw.workpieces)}")
    pool = pools[int(rng.integers(len(pools)))]
    return pool[int(rng.integers(len(pool)))]


def _other(part: PartModel, rng: np.random.Generator, draw: Draw, *, same: bool) -> PartModel:
    """A part that could be mixed up with `part`, of the workpieces that are allowed."""
    if draw.subset:
        pools = [lookalikes.of(part, kind) for kind in lookalikes.KINDS]
        pool = [pool for pool in pools if pool]
        chosen = pool[int(rng.integers(len(pool)))]
        return chosen[int(rng.integers(len(chosen)))]
    for _ in range(_TRIES):
        other = trays.other_part(part, rng, same_workpiece=same)
        if _allowed(other, draw):
            return other
    return trays.other_part(part, rng, same_workpiece=True)


def _allowed(model: PartModel, draw: Draw) -> bool:
    return not draw.workpieces or model.workpiece in draw.workpieces


def _any_part(rng: np.random.Generator, kinds: Sequence[str] = WORKPIECES) -> PartModel:
    """Workpieces equally likely, then model numbers."""
    models = of_workpiece(kinds[int(rng.integers(len(kinds)))])
    return models[int(rng.integers(len(models)))]


def _tray_case(name: str, task: Task, plan: Plan, rng: np.random.Generator) -> Made:
    cloud, order = _tray_of(name, plan.parts, rng)
    readings = {MARKS[n]: plan.parts[i].id for n, i in enumerate(order)}
    found = wrong(plan.required, readings)
    case = Case(
        id=name,
        task=task,
        input=CaseInput(scene=scene_file(name)),
        product=plan.product,
        truth=Truth(
            answer=_letters(found),
            readings=readings,
            missing=found.missing,
            violations=found.violations,
            outcome="FAIL" if found.violations else "PASS",
        ),
    )
    return Made(case, cloud)


def _tray_of(
    name: str, models: Sequence[PartModel], rng: np.random.Generator
) -> tuple[Cloud, list[int]]:
    """A scan of parts on a tray, and the parts in the order of their marks."""
    for _ in range(_TRIES):
        meshes = [rest_pose.rest(fasteners.build(model, rng), rng) for model in models]
        tallest = max(float(mesh.extents()[2]) for mesh in meshes)
        # The station asks for gaps of a fifth of the tallest part.
        placed = layout.lay_out(meshes, rng, (0.2 * tallest + 0.5, 0.8 * tallest + 0.5))
        scale = _scale(placed, rng)
        order = _left_to_right(placed, scale, rng)
        if order is not None:
            break
    else:
        raise RuntimeError(f"case {name}: no tray with a clear order of parts in {_TRIES} tries")
    cloud, _ = scan(placed, scanner.rig(scale), rng)
    return cloud, order


def _letters(found: Wrong) -> str | tuple[str, ...]:
    return found.answer[0] if len(found.answer) == 1 else found.answer


def _surface_case(name: str, rng: np.random.Generator, draw: Draw) -> Made:
    """One part, clean or with one defect that at least two cells of its views show."""
    kind = tasks.NORMAL
    if rng.random() >= draw.clean:
        kind = tasks.DEFECT_CLASSES[int(rng.integers(len(tasks.DEFECT_CLASSES)))]
    for _ in range(_TRIES):
        model = _any_part(rng, draw.workpieces or SURFACE_WORKPIECES)
        if draw.parts:
            model = by_id(draw.parts[int(rng.integers(len(draw.parts)))])
        mesh = rest_pose.rest(fasteners.build(model, rng), rng)
        faces, made = np.zeros(len(mesh.faces), bool), None
        if kind != tasks.NORMAL:
            made = defects.apply_defect(mesh, kind, rng, random_scale(kind, rng))
            mesh, faces = rest_pose.settle(made.mesh), made.face_flag
        cloud, defect = scan(
            [mesh], scanner.rig(_scale([mesh], rng)), rng, faces, finish=draw.finish
        )
        parts = scene.separate(cloud).parts
        if not parts:
            continue
        part = max(parts, key=lambda item: len(item.points))
        truth = surface_truth(part, defect_flags(part, cloud.points, defect))
        if kind == tasks.NORMAL or truth.cells.sum() >= 2:
            break
    else:
        raise RuntimeError(f"case {name}: no visible {kind} in {_TRIES} tries")
    file = scene_file(name)
    cells = {
        view: tuple((int(r), int(c)) for r, c in np.argwhere(truth.cells[i]))
        for i, view in enumerate(VIEWS)
    }
    case = Case(
        id=name,
        task="surface",
        input=CaseInput(scene=file),
        product=Product("PART", "single", ("surface",), parts={model.id: 1}),
        truth=Truth(
            readings={MARKS[0]: model.id},
            defect=kind,
            points=file,
            grids=cells,
            score=float(truth.score),
            defect_size_mm=None if made is None else made.size_mm,
            defect_size_px=None if made is None else made.size_mm / cloud.camera_pixel_mm,
            defect_extent_mm=None if made is None else made.extent_mm,
            outcome="PASS" if kind == tasks.NORMAL else "FAIL",
        ),
    )
    return Made(case, cloud, defect)


def scene_file(name: str) -> str:
    return f"scenes/{name}.npz"


def _scale(meshes: Sequence[Mesh], rng: np.random.Generator) -> float:
    """The field filled by the parts, or up to a quarter wider."""
    return scanner.scale_for(*trays.field_mm(meshes)) * float(rng.uniform(1.0, 1.25))


def _left_to_right(
    meshes: Sequence[Mesh], scale: float, rng: np.random.Generator
) -> list[int] | None:
    """Parts in the order of their marks; None where two lie at almost the same x."""
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in scanner.rig(scale)]))
    centres = []
    for mesh in meshes:
        points, _, _ = sample_surface(mesh, 6000, rng)
        part = pose.align(points[points[:, 2] > 0.5 * pixel].astype(np.float32), pixel)
        centres.append(float(part.tray_from_part[0, 3]))
    order = sorted(range(len(meshes)), key=lambda i: centres[i])
    steps = np.diff([centres[i] for i in order])
    return order if len(steps) == 0 or float(steps.min()) > _ORDER_PX * pixel else None


def write_scene(path: Path, cloud: Cloud, defect: NDArray[np.bool_] | None = None) -> None:
    """NPZ with points float32 [N, 3], unit, frame, camera_pixel_mm, poses and, if any, defect.

    Coordinates are rounded to 1/128 camera pixel, so that they compress; the same case gives the
    same bytes. Appears by rename.
    """
    step = 2.0 ** np.floor(np.log2(cloud.camera_pixel_mm / 128))
    arrays: dict[str, NDArray[np.generic]] = {
        "points": (np.rint(cloud.points / step) * step).astype(np.float32),
        "unit": np.array("mm"),
        "frame": np.array(cloud.frame),
        "camera_pixel_mm": np.array(cloud.camera_pixel_mm),
        "poses": np.array(cloud.poses),
    }
    if defect is not None:
        arrays["defect"] = defect
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".partial")
    with zipfile.ZipFile(partial_file, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(member, buffer.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=1)
    partial_file.replace(path)


def _work(job: tuple[Task, int, int], folder: Path, draw: Draw) -> str:
    cv2.setNumThreads(1)
    made = make_case(*job, draw)
    for file, cloud in zip(made.case.input.references, made.references, strict=True):
        write_scene(folder / file, cloud)
    write_scene(folder / scene_file(made.case.id), made.cloud, made.defect)
    return write_line(made.case)


def write_cases(
    folder: Path,
    wanted: Sequence[Task],
    count: int,
    seed: int,
    jobs: int,
    draw: Draw = PLAIN,
    *,
    quiet: bool = False,
) -> int:
    """Make the cases that `folder` lacks; returns how many. Other cases in it stay."""
    if seed in TRAINING_SEEDS:
        raise SystemExit(f"seed {seed} is used by training; take another one")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    lines = _kept_lines(folder)
    todo = [
        (task, seed, number)
        for number in range(count)
        for task in wanted
        if case_id(task, seed, number, draw) not in lines
    ]
    path.write_text("".join(f"{line}\n" for line in lines.values()), encoding="utf-8")
    total = count * len(wanted)
    bar = tqdm(total=total, initial=total - len(todo), unit="case", desc="cases", disable=quiet)
    with bar, path.open("a", encoding="utf-8") as file:
        work = partial(_work, folder=folder, draw=draw)
        if jobs <= 1:
            for job in todo:
                _append(file, work(job), bar)
        else:
            context = multiprocessing.get_context("spawn")
            with context.Pool(jobs) as pool:
                for line in pool.imap(work, todo):
                    _append(file, line, bar)
    return len(todo)


def _append(file: io.TextIOWrapper, line: str, bar: tqdm) -> None:
    file.write(f"{line}\n")
    file.flush()
    bar.update()


def _kept_lines(folder: Path) -> dict[str, str]:
    """Case id -> line, of whole lines whose scene is there; a killed run may leave half a line."""
    path = folder / FILE
    kept: dict[str, str] = {}
    if not path.exists():
        return kept
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            data = json.loads(line)
            name, source = data["id"], data["input"].get("scene")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if source is None or (folder / source).exists():
            kept[name] = line
    return kept


def _chosen(
    parser: argparse.ArgumentParser, only: str | None, without: str | None
) -> tuple[str, ...]:
    """The workpieces of `--workpieces` or `--without`; empty for all."""
    given = [name.strip() for name in (only or without or "").split(",") if name.strip()]
    unknown = [name for name in given if name not in WORKPIECES]
    if unknown:
        parser.error(f"unknown workpieces {', '.join(unknown)}: expected {', '.join(WORKPIECES)}")
    if without:
        return tuple(name for name in WORKPIECES if name not in given)
    return tuple(given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of cases.jsonl")
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--count", type=int, default=300, help="cases a task")
    parser.add_argument("--seed", type=int, required=True, help="not one that training uses")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    chosen = parser.add_mutually_exclusive_group()
    names = ", ".join(WORKPIECES)
    chosen.add_argument("--workpieces", metavar="A,B", help=f"only these of {names}")
    chosen.add_argument("--without", metavar="A,B", help="all but these")
    parser.add_argument("--subset", choices=(LOOKALIKE,), default="", help="hard cases only")
    parser.add_argument("--references", type=int, default=0, help="scans of what is right a case")
    own = parser.add_argument_group("surfaces of one line")
    own.add_argument("--parts", default="", metavar="A,B", help="only these model numbers")
    own.add_argument(
        "--clean-share", type=float, default=CLEAN_SHARE, help="without a defect (%(default)s)"
    )
    own.add_argument(
        "--roughness", type=float, default=0.0, metavar="PX",
        help="root mean square of the finish, in camera pixels (default 0: smooth)",
    )  # fmt: skip
    own.add_argument(
        "--grain", type=float, default=SMOOTH.grain, metavar="PX", help="its wave length"
    )
    args = parser.parse_args()
    wanted = TASKS if args.task == "all" else (args.task,)
    if args.subset:
        wanted = tuple(task for task in wanted if task != "surface")
        if not wanted:
            parser.error("--subset lookalike is about trays: expected --task workpiece or assembly")
    kinds = _chosen(parser, args.workpieces, args.without)
    parts = tuple(name.strip() for name in args.parts.split(",") if name.strip())
    unknown = [name for name in parts if name not in {model.id for model in CATALOGUE}]
    if unknown:
        parser.error(f"--parts: unknown model numbers {', '.join(unknown)}")
    finish = Finish(args.roughness, args.grain)
    draw = Draw(kinds, args.subset, args.references, parts, args.clean_share, finish)
    made = write_cases(args.out, wanted, args.count, args.seed, args.jobs, draw)
    print(json.dumps({"cases": str(args.out), "made": made, "asked": args.count * len(wanted)}))


if __name__ == "__main__":
    main()
