r"""Synthetic training pools: catalogue parts -> simulated scan -> the station's own pictures.

    python -m training.synth surface     --out .work/data --count 15000 --jobs 2
    python -m training.synth sheet       --out .work/data --count 30000 --jobs 2
    python -m training.synth surface-val --out .work/data --count 500
    python -m training.synth surface     --out .work/data --count 5000 --path decoded
    python -m training.synth surface     --out /shared/data --count 200000 \
        --backend ray --ray-address auto                  # on every core of a cluster
    python -m training.synth look  .work/data/surface     # table, look.png, contact.png
    python -m training.synth check .work/data/surface     # is every shard whole and as asked?

sheet: several parts with marks, to be read. surface: one part, clean or with a defect made on its
mesh. `--path surrogate` is a fast stand-in for the scanner; `decoded` projects patterns, takes
camera images and decodes them, as a station does. What is randomised, and how much, is listed in
`training.data.variation`; `--clean` switches it off.

A pool is a folder of shards and `pool.json`, which says how it was made and what it counts. The
same settings give the same bytes, on any backend, with any number of workers. Interrupted or killed
at any time, it leaves whole shards only; the same command makes what is missing. A shard that fails
is named with its seed, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from forge_station.contract.error import StationError
from training.data import contact, engine, pool, shards
from training.data.pool import Recipe, Shares
from training.data.variation import CLEAN, USUAL

POOLS = ("sheet", "surface", "sheet-val", "surface-val")
VALIDATION_SEED = 900000
# Large arrays come and go in every sample: kept by the process, not returned to the kernel, they
# cost no page faults.
_MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (("mmap_max", 0), ("trim_threshold", 10**9), ("top_pad", 2**26))
)


def backend(args: argparse.Namespace) -> engine.Backend:
    """The backend that the command line asks for."""
    if args.backend == "serial":
        return engine.serial
    if args.backend == "ray":
        return partial(engine.on_ray, workers=args.jobs, address=args.ray_address)
    return partial(engine.processes, workers=args.jobs)


def recipe_of(args: argparse.Namespace) -> Recipe:
    seed = args.seed
    if seed is None:
        seed = VALIDATION_SEED if args.command.endswith("-val") else 0
    return Recipe(
        task=args.command.removesuffix("-val"),
        path=args.path,
        seed=seed,
        shard=args.shard,
        shares=Shares(**{f.name: getattr(args, f"{f.name}_share") for f in fields(Shares)}),
        vary=CLEAN if args.clean else USUAL,
    )


def fill(
    recipe: Recipe, folder: Path, count: int, by: engine.Backend, *, adopt: bool = False
) -> dict[str, object]:
    """Make the shards that a pool of `count` samples lacks; returns what it did."""
    began = time.monotonic()
    pool.refuse_other(folder, recipe, adopt=adopt)
    wanted = range(-(-count // recipe.shard))
    there = set(shards.numbers(folder))
    missing = [number for number in wanted if number not in there]
    # Every row besides its picture is below 1.5 kB.
    engine.refuse_small_disk(folder, len(missing) * recipe.shard * (recipe.image_bytes + 1500))
    shards.without_partials(folder)
    pool.write(folder, recipe, {})
    failed: list[engine.Done] = []
    try:
        failed = engine.run(
            partial(pool.make, recipe, folder),
            missing,
            by,
            samples=recipe.shard,
            made=len(wanted) - len(missing),
            seed_of=lambda number: str(recipe.seeds(number)),
            name=folder.name,
        )
    finally:
        described = pool.write(folder, recipe, {done.number: done.error for done in failed})
    seconds = time.monotonic() - began
    made = (len(missing) - len(failed)) * recipe.shard
    return {
        "pool": str(folder),
        "samples": described["counts"]["samples"],
        "made": made,
        "failed": [done.number for done in failed],
        "seconds": round(seconds, 1),
        "samples_per_s": round(made / max(seconds, 1e-9), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for name, least in (("count", 1), ("shard", 1), ("jobs", 1), ("seed", 0)):
        value = getattr(args, name, None)
        if value is not None and value < least:
            parser.error(f"--{name}: expected {least} or more, got {value}")
    try:
        if args.command == "check":
            return _check(args.pool)
        if args.command == "look":
            return _look(args.pool, args.out or args.pool)
        os.environ.setdefault("GLIBC_TUNABLES", _MALLOC)  # read by the workers when they start
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        name = args.name or args.command + ("-decoded" if args.path == "decoded" else "")
        folder = args.out / name
        report = fill(recipe_of(args), folder, args.count, backend(args), adopt=args.adopt)
        if args.contact_sheet and report["samples"]:
            contact.write(contact.page(folder), args.contact_sheet)
        print(json.dumps(report))
        return 1 if report["failed"] else 0
    except StationError as error:
        print(f"synth: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsynth: stopped; whole shards are kept, the same command goes on", file=sys.stderr)
        return 130


def _check(folder: Path) -> int:
    found = pool.faults(folder)
    for fault in found:
        print(fault)
    held = pool.read(folder)["counts"] if found else pool.counts(folder)
    print(json.dumps({"pool": str(folder), "faults": len(found), "samples": held["samples"]}))
    return 1 if found else 0


def _look(folder: Path, out: Path) -> int:
    described = pool.read(folder)
    held = pool.counts(folder)
    if not held["samples"]:
        raise pool.PoolError("the pool has no whole shard yet", which=folder)
    for line in _table(held):
        print(line)
    out.mkdir(parents=True, exist_ok=True)
    pictures = {"look": out / "look.png", "contact": out / "contact.png"}
    contact.write(contact.statistics(folder, held), pictures["look"])
    contact.write(contact.page(folder), pictures["contact"])
    files = {name: str(path) for name, path in pictures.items()}
    print(json.dumps({"pool": str(folder), "seed": described["settings"]["seed"], **held, **files}))
    return 0


def _table(held: dict[str, object]) -> Iterator[str]:
    for title, value in held.items():
        if not isinstance(value, dict):
            yield f"{title:24}{value:>8}"
            continue
        total = max(sum(value.values()), 1)
        yield title
        for name, count in value.items():
            yield f"  {name:22}{count:>8}{count / total:>8.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.synth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in POOLS:
        _add_pool(commands.add_parser(name, help=f"make or extend the pool {name}"))
    check = commands.add_parser("check", help="verify every shard of a pool; exit code 1 on faults")
    check.add_argument("pool", type=Path, help="folder of pool.json")
    look = commands.add_parser("look", help="table and pictures of what a pool holds")
    look.add_argument("pool", type=Path, help="folder of pool.json")
    look.add_argument("--out", type=Path, help="folder for the pictures (default: the pool's)")
    return parser


def _add_pool(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="data folder (git-ignored)")
    add("--name", help="the pool's folder in it (default: its kind, with -decoded where it is)")
    add("--count", type=int, default=1000, help="samples in all (default %(default)s)")
    add(
        "--path",
        choices=["surrogate", "decoded"],
        default="surrogate",
        help="surrogate: fast stand-in of the scanner; decoded: pattern images and decoder, about "
        "five times slower (default %(default)s)",
    )
    add("--seed", type=int, help=f"default 0, of -val pools {VALIDATION_SEED}")
    add("--shard", type=int, default=250, help="samples a shard (default %(default)s)")
    add("--clean", action="store_true", help="no domain randomisation")
    add("--adopt", action="store_true", help="shards that lack a pool.json have these settings")
    add("--contact-sheet", type=Path, metavar="PNG", help="page of samples to look at")
    add = parser.add_argument_group("where it runs").add_argument
    add(
        "--backend",
        choices=["processes", "serial", "ray"],
        default="processes",
        help="this machine's cores, this process, or Ray (extra cluster) (default %(default)s)",
    )
    jobs = max(1, (os.cpu_count() or 2) - 1)
    add(
        "--jobs",
        type=int,
        default=jobs,
        help="processes or local Ray workers (default %(default)s)",
    )
    add(
        "--ray-address", metavar="auto|HOST:PORT", help="a running cluster instead of local workers"
    )
    add = parser.add_argument_group("shares of what is drawn").add_argument
    for f in fields(Shares):
        meaning = f"{f.metadata['help']} (default %(default)s)"
        add(f"--{f.name}-share", type=float, default=f.default, metavar="0..1", help=meaning)


if __name__ == "__main__":
    sys.exit(main())
