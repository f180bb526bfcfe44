"""One synthetic pool: its recipe, its shards, and `pool.json`, which says what it is made of.

A shard follows from (recipe, number) alone. A pool is only ever extended with the recipe it was
begun with; `pool.json` holds that recipe, what the pool counts, and which code made it.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.error import ContractError
from forge_station.contract.views import NANO_LAYOUT
from training.data import decoded, shards, sheet_samples, surface_samples
from training.data.sheet_samples import ScenePlan
from training.data.surface_samples import SurfaceSample
from training.data.variation import USUAL, Variation

FILE = "pool.json"
KINDS = ("batch", "kit", "inventory")
_INDEX = {model.id: i for i, model in enumerate(CATALOGUE)}
_TRIES = 400
_SALT = {
    "sheet": {"surrogate": [], "decoded": [11]},
    "surface": {"surrogate": [7], "decoded": [17]},
}
_PACKAGES = ("numpy", "opencv-python-headless", "numba", "scipy")


class PoolError(ContractError):
    """A pool that is not what it was asked to be."""


def _share(default: float, meaning: str) -> float:
    """A field of `Shares`; its meaning is the command line's help."""
    found: float = field(default=default, metadata={"help": meaning})
    return found


@dataclass(frozen=True)
class Shares:
    """How often what is drawn: a line is mostly good, a model must see enough that is not.

    Of batches and kits that are not right, one part is another model number (60 %) or workpiece.
    """

    batch: float = _share(
        0.3, "of the sheets; what is no batch or kit is any parts of similar size"
    )
    kit: float = _share(0.3, "of the sheets")
    correct: float = _share(0.5, "of the batches: nothing odd among them")
    complete: float = _share(0.6, "of the kits: nothing strange among them")
    clean: float = _share(
        0.3, "of the surface pictures: no defect; the classes share the rest evenly"
    )
    closer: float = _share(
        0.0, "of the surface pictures: a window of each view at twice the scale (second look)"
    )
    promised: float = _share(0.8, "of the surface pictures: workpieces the check is promised for")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value <= 1.0:
                raise PoolError("bad share", which=name, expected="0..1", got=str(value))
        if self.batch + self.kit > 1.0:
            raise PoolError(
                "batch and kit share the sheets",
                expected="at most 1 together",
                got=f"{self.batch} + {self.kit}",
            )


@dataclass(frozen=True)
class Recipe:
    """All that a pool's bytes depend on, besides the code. `shard`: samples a shard."""

    task: Literal["sheet", "surface"]
    path: Literal["surrogate", "decoded"] = "surrogate"
    seed: int = 0
    shard: int = 250
    shares: Shares = Shares()
    vary: Variation = USUAL

    def seeds(self, number: int) -> list[int]:
        """Seed of the generator of one shard."""
        return [self.seed, number, *_SALT[self.task][self.path]]

    @property
    def image_bytes(self) -> int:
        """Size of one picture."""
        height, width, channels = _shape(self.task)
        return height * width * channels


def _shape(task: str) -> tuple[int, int, int]:
    return (*NANO_LAYOUT.sheet_size, 3) if task == "sheet" else (*NANO_LAYOUT.surface_size, 5)


# ---------------------------------------------------------------- shards


def make(recipe: Recipe, folder: Path, number: int) -> None:
    """Make and write one shard."""
    cv2.setNumThreads(1)
    rng = np.random.default_rng(recipe.seeds(number))
    images = np.zeros((recipe.shard, *_shape(recipe.task)), np.uint8)
    fill = _sheets if recipe.task == "sheet" else _surfaces
    shards.write_shard(folder, number, images, fill(recipe, images, rng))


def plan(shares: Shares, rng: np.random.Generator) -> ScenePlan:
    """What lies on the tray of one sheet."""
    draw = rng.random()
    if draw < shares.batch:
        return sheet_samples.plan_batch(rng, shares.correct)
    if draw < shares.batch + shares.kit:
        return sheet_samples.plan_kit(rng, shares.complete)
    return sheet_samples.plan_inventory(rng)


def _sheets(
    recipe: Recipe, images: NDArray[np.uint8], rng: np.random.Generator
) -> dict[str, NDArray[np.generic]]:
    count, columns = len(images), NANO_LAYOUT.columns
    part = np.full((count, columns), -1, np.int16)
    size = np.zeros((count, columns, 3), np.float32)
    pieces, kind = np.zeros(count, np.int8), np.zeros(count, np.int8)
    scale, right = np.zeros(count, np.float32), np.zeros(count, bool)
    draw = sheet_samples.make_sheet if recipe.path == "surrogate" else decoded.decoded_sheet
    for i in range(count):
        # What lies there is drawn before the retries: trays hard to scan are not thinned out.
        scene = plan(recipe.shares, rng)
        for _ in range(_TRIES):
            try:
                drawn, sizes = draw(scene, rng, recipe.vary)
                break
            except ValueError:  # a part that no pose sees, or parts that separation merges
                continue
        else:
            raise RuntimeError(f"{_TRIES} scans of {[m.id for m in scene.parts]} show no sheet")
        n = len(scene.parts)
        images[i], scale[i], pieces[i] = drawn.image, drawn.mm_per_px, n
        part[i, :n], size[i, :n] = [_INDEX[model.id] for model in scene.parts], sizes
        kind[i], right[i] = KINDS.index(scene.kind), scene.right
    return {
        "count": pieces,
        "part": part,
        "size": size,
        "mm_per_px": scale,
        "kind": kind,
        "right": right,
    }


def _surfaces(
    recipe: Recipe, images: NDArray[np.uint8], rng: np.random.Generator
) -> dict[str, NDArray[np.generic]]:
    count = len(images)
    meta: dict[str, NDArray[Any]] = {
        "part": np.zeros(count, np.int16),
        "size": np.zeros((count, 3), np.float32),
        "defect": np.zeros(count, np.uint8),
        "grid": np.zeros((count, 3, tasks.GRID_ROWS, tasks.GRID_ROWS), bool),
        "score": np.zeros(count, np.int8),
        "pixel_mm": np.zeros(count, np.float32),
        "defect_mm": np.zeros(count, np.float32),
        "defect_scale": np.zeros(count, np.float32),
        "closed": np.zeros(count, bool),
        "closer": np.zeros(count, bool),
    }
    for i in range(count):
        # The class is drawn before the retries: classes hard to see are not thinned out.
        clean = rng.random() < recipe.shares.clean
        kind = 0 if clean else int(rng.integers(1, len(tasks.SURFACE_CLASSES)))
        closer = rng.random() < recipe.shares.closer
        part, sample = _surface(recipe, tasks.SURFACE_CLASSES[kind], closer, rng)
        images[i] = sample.image
        meta["part"][i], meta["defect"][i] = _INDEX[part], kind
        meta["size"][i], meta["grid"][i] = sample.size, sample.grid
        meta["score"][i], meta["pixel_mm"][i] = sample.score, sample.pixel_mm
        meta["defect_mm"][i], meta["defect_scale"][i] = sample.defect.mm, sample.defect.scale
        meta["closed"][i], meta["closer"][i] = sample.defect.closed, sample.closer
    return meta


def _surface(
    recipe: Recipe, defect: str, closer: bool, rng: np.random.Generator
) -> tuple[str, SurfaceSample]:
    draw = surface_samples.make_surface if recipe.path == "surrogate" else decoded.decoded_surface
    for _ in range(_TRIES):
        model = surface_samples.surface_part(rng, recipe.shares.promised)
        try:
            sample = draw(model, defect, rng, recipe.vary, closer=closer)
        except ValueError:  # nothing of the part was seen
            continue
        if sample is not None:  # None: no view shows the defect
            return model.id, sample
    raise RuntimeError(f"no visible {defect} in {_TRIES} parts")


# ---------------------------------------------------------------- pool.json


def settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON holds it."""
    return json.loads(json.dumps(asdict(recipe)))


def refuse_other(folder: Path, recipe: Recipe, *, adopt: bool = False) -> None:
    """PoolError where `folder` holds shards of another recipe, or of none on record."""
    path = folder / FILE
    if not path.exists():
        if shards.numbers(folder) and not adopt:
            raise PoolError(
                "the pool has shards but no pool.json: its recipe is not known",
                which=folder,
                action="take another --out or --name, or state with --adopt that they were made "
                "with these settings",
            )
        return
    there, asked = _flat(read(folder)["settings"]), _flat(settings(recipe))
    unlike = [
        f"{key} {there.get(key)} (asked: {asked.get(key)})"
        for key in sorted(there.keys() | asked.keys())
        if there.get(key) != asked.get(key)
    ]
    if unlike:
        raise PoolError(
            "the pool was begun with other settings",
            which=folder,
            got="; ".join(unlike),
            action="give the same settings, or take another --out or --name",
        )


def read(folder: Path) -> dict[str, Any]:
    """pool.json of a pool. PoolError where it is missing or broken."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["settings"], dict):
            raise TypeError("settings is no object")
    except FileNotFoundError:
        raise PoolError("no pool here", which=path, action="name a pool's own folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PoolError("cannot be read", which=path, got=str(error)) from None
    return dict(found)


def write(folder: Path, recipe: Recipe, failed: Mapping[int, str]) -> dict[str, Any]:
    """Write pool.json for the shards that are there; returns what it says."""
    described = {
        "settings": settings(recipe),
        "counts": counts(folder),
        "failed": {f"{number:05d}": error for number, error in sorted(failed.items())},
        "code": {"revision": revision(), **versions()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{FILE}.partial"
    partial.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / FILE)
    return described


def counts(folder: Path) -> dict[str, Any]:
    """How much of what the whole shards of a pool hold."""
    metas = [shards.read_meta(folder, number) for number in shards.numbers(folder)]
    out: dict[str, Any] = {"shards": len(metas), "samples": 0}
    if not metas:
        return out
    meta = {key: np.concatenate([m[key] for m in metas if key in m]) for key in metas[0]}
    part = meta["part"].ravel()
    workpiece = Counter(CATALOGUE[int(p)].workpiece for p in part[part >= 0])
    out["samples"] = len(meta["part"])
    if "defect" in meta:
        names = [tasks.SURFACE_CLASSES[int(k)] for k in meta["defect"]]
        out["class"] = _counted(names, tasks.SURFACE_CLASSES)
    if "kind" in meta:
        right = meta["right"].astype(bool)
        names = [KINDS[int(k)] for k in meta["kind"]]
        out["scene"] = _counted(names, KINDS)
        out["correct batches"] = int((right & (meta["kind"] == 0)).sum())
        out["complete kits"] = int((right & (meta["kind"] == 1)).sum())
        out["pieces"] = int(meta["count"].sum())
    out["workpiece"] = {name: workpiece[name] for name in WORKPIECES}
    return out


def _counted(names: list[str], order: tuple[str, ...]) -> dict[str, int]:
    found = Counter(names)
    return {name: found[name] for name in order}


def revision() -> str:
    """Git revision of the checkout, with "+" where its code differs from it; "" outside of one."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", "../..")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of the packages that a picture's bytes depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out


# ---------------------------------------------------------------- check


def faults(folder: Path) -> list[str]:
    """What is wrong with a pool: broken shards, gaps, content, shares far from the recipe's."""
    described = read(folder)
    there = shards.numbers(folder)
    found = [f"no shards in {folder}"] if not there else []
    gaps = sorted(set(range(there[-1] + 1 if there else 0)) - set(there))
    found += [f"shard {number:05d}: missing; run synth again" for number in gaps]
    broken = False
    for number in there:
        for fault in shards.faults(folder, number):
            broken = True
            found.append(f"shard {number:05d}: {fault}; delete it and run synth again")
    for path in folder.glob(f"[0-9]*{shards.IMAGES}"):
        if int(path.name.removesuffix(shards.IMAGES)) not in there:
            found.append(f"{path.name}: images without a meta file; run synth again")
    if not broken:
        found += _unbalanced(described["settings"]["shares"], counts(folder))
    return found


def _unbalanced(asked: Mapping[str, float], got: Mapping[str, Any]) -> list[str]:
    """Shares more than four standard deviations from what was asked."""
    shares: list[tuple[str, int, int, float]] = []
    if "class" in got:
        shares.append(("clean", got["class"][tasks.NORMAL], got["samples"], asked["clean"]))
        for name in tasks.DEFECT_CLASSES:
            even = (1.0 - asked["clean"]) / len(tasks.DEFECT_CLASSES)
            shares.append((name, got["class"][name], got["samples"], even))
    if "scene" in got:
        scene = got["scene"]
        shares += [(name, scene[name], got["samples"], asked[name]) for name in ("batch", "kit")]
        shares.append(("correct", got["correct batches"], scene["batch"], asked["correct"]))
        shares.append(("complete", got["complete kits"], scene["kit"], asked["complete"]))
    out = []
    for name, count, total, share in shares:
        spread = max((total * share * (1 - share)) ** 0.5, 1.0)
        if abs(count - total * share) > 4.0 * spread:
            out.append(f"share of {name}: {count} of {total}, asked for {share:.2f}")
    return out
