"""The steps of the loop, each a call of the module that a person would call for it.

A step says what it is made from (`inputs`, a digest), what it leaves (`outputs`), and how long it
takes. Training goes on from its own states; every other step is made whole again. Nothing here
trains, judges or exports by itself.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from forge_station import private_key
from forge_station.contract import record, spec
from training.loop import labelled, recipe, state
from training.loop.error import LineError
from training.loop.recipe import Recipe
from training.loop.state import State

Notes = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step. `estimate_s`: on two threads of one core; what a step took here replaces it."""

    name: str
    what: str
    inputs: Callable[[State], str]
    outputs: tuple[Path, ...]
    make: Callable[[], Notes]
    estimate_s: float
    goes_on: bool = False
    """Its files of a run that was killed are of use to the next."""


@dataclass(frozen=True)
class Loop:
    """One run: the line, what people said, where it goes, who signs."""

    line: Path
    out: Path
    recipe: Recipe
    base: Path
    """Folder that paths of the recipe are seen from."""
    labels: tuple[Path, ...] = ()
    evidence: Path | None = None
    checkpoint: Path | None = None
    key: Path | None = None
    release: int = 1
    quiet: bool = False
    products: tuple[spec.Product, ...] = field(default=())
    whole: Loop | None = None
    """The run that this is a fold of (training.loop.folds)."""
    fold: int = 0

    @classmethod
    def of(cls, line: Path, out: Path, **chosen: Any) -> Loop:
        """Everything that can be refused before any work is. Raises StationError."""
        path = recipe.line_file(line)
        found, base = recipe.read(line)
        loop = cls(path.resolve(), out.resolve(), found, base.resolve(), **chosen)
        if bool(loop.labels) != (loop.evidence is not None):
            raise LineError(
                "labels and the evidence they are about belong together",
                expected="--labels and --evidence, or neither",
            )
        for given in loop.labels:
            if not given.is_file():
                raise LineError("no such file", which="--labels", got=given)
        if loop.evidence is not None and not loop.evidence.is_dir():
            raise LineError("no such folder", which="--evidence", got=loop.evidence)
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise LineError("line file cannot be read", which=path, got=error) from error
        start = loop.start
        if start is not None and not (start / "state.pt").is_file():
            raise LineError(
                "no checkpoint to start from", which=start,
                expected="a folder of `python -m training.sft` with state.pt",
            )  # fmt: skip
        if loop.key is not None:
            private_key.read(loop.key)
        if found.calibrate.folds == 1 or (found.calibrate.folds and found.calibrate.suggest):
            raise LineError(
                "limits cannot be chosen this way", which=f"{recipe.FILE}: calibrate",
                expected="folds: 2 or more, without suggest; or suggest: true, without folds",
                got=f"folds: {found.calibrate.folds}, suggest: {found.calibrate.suggest}",
            )  # fmt: skip
        named = (found.parts.cases, found.calibrate.before)
        for name in (*found.data, *filter(None, named)):
            if not loop.path(name).is_dir():
                raise LineError("no such folder", which=recipe.FILE, got=loop.path(name))
        return replace(loop, products=tuple(spec.parse_line(data, str(path)).products))

    def path(self, name: str) -> Path:
        """A path of the recipe."""
        return (self.base / name).resolve()

    @property
    def start(self) -> Path | None:
        if self.checkpoint is not None or self.recipe.checkpoint is None:
            return self.checkpoint
        return self.path(self.recipe.checkpoint)

    @property
    def inspected(self) -> tuple[str, ...]:
        """Parts whose surface is inspected."""
        own = {part for p in self.products if "surface" in p.checks for part in p.parts}
        return tuple(sorted(own))

    @property
    def shared(self) -> Path:
        """Folder of what a fold has from the whole run: pools and references."""
        return self.out if self.whole is None else self.whole.out

    @property
    def folds(self) -> range:
        """Numbers of the folds; without labels there are none."""
        return range(1, 1 + self.recipe.calibrate.folds) if self.labels else range(0)

    @property
    def bundle(self) -> Path:
        return self.out / "bundle"

    @property
    def trained(self) -> Path:
        """The checkpoint that is exported: GRPO's, where it made one."""
        grpo = self.out / "grpo"
        return grpo if (grpo / "training_card.json").is_file() else self.out / "sft"

    @property
    def cases(self) -> Path:
        named = self.recipe.parts.cases
        return self.out / "cases" if named is None else self.path(named)

    def steps(self) -> list[Step]:
        """All steps in their order."""
        from training.loop import folds, judging

        own, out = self.recipe, self.out
        files = functools.partial(_files, out)
        counts = own.synth.sheets + own.synth.surfaces + own.synth.closer
        judged = max(1, own.parts.count) * len(judging.tasks(self))
        return [
            Step(
                "labels", "people's labels and their evidence -> pictures to learn from",
                lambda _: self._said(), files("labels"), self.take_labels, 20 if self.labels else 0,
            ),
            Step(
                "synth", "synthetic pools, where the recipe names none to train on again",
                lambda _: state.of([own.synth, bool(own.data)]),
                files("synth"), self.synthesise,
                0.6 * (0 if own.data else counts + 2 * own.synth.validation), goes_on=True,
            ),
            Step(
                "sft", "supervised fine-tuning of the checkpoint" if self.start is not None
                else "training from scratch: no checkpoint was named",
                lambda now: state.of(
                    [own.sft, own.threads, self._start_digest(), _made(now, "labels", "synth"),
                     *map(_listing, map(self.path, own.data))]
                ),
                files("sft"), self.fine_tune, own.sft.steps * own.sft.batch * 0.08, goes_on=True,
            ),
            Step(
                "grpo", "GRPO on the rewards, unless it raises the alarms on clean parts",
                lambda now: state.of([own.grpo, _made(now, "sft")]),
                files("grpo"), self.reinforce, 1.5 * own.grpo.prompts, goes_on=True,
            ),
            Step(
                "references", "sound shapes that a surface is compared with",
                lambda _: state.of(self.inspected), files("references.npz"), self.refer,
                5.0 * len(self.inspected),
            ),
            Step(
                "parts", "parts whose truth is known, where the recipe names none",
                lambda _: state.of([own.parts, self.inspected, self._named_cases()]),
                files("cases") if own.parts.cases is None else (), self.make_parts,
                0.0 if own.parts.cases else 1.5 * judged, goes_on=True,
            ),
            Step(
                "draft", "graphs of the checkpoint, to judge parts with",
                lambda now: state.of(
                    [own.thresholds, own.precision, _made(now, "grpo", "sft", "references"),
                     state.digest(self.line)]
                ),
                files("draft"), lambda: judging.draft(self), 10,
            ),
            Step(
                "judge", "labelled parts that did not train, and the others, as the draft judges",
                lambda now: state.of([_made(now, "draft", "parts", "labels"), self._named_cases()]),
                files("rows.jsonl"), lambda: judging.judge(self), 0.5 * judged + 20,
            ),
            *(
                Step(
                    folds.name(number), "trained without some labelled parts, which it judges then",
                    lambda now: state.of(
                        [own.sft, own.grpo, own.thresholds, own.precision, own.threads,
                         own.calibrate.folds, self._start_digest(), state.digest(self.line),
                         self._said(), _made(now, "labels", "synth", "references"),
                         *map(_listing, map(self.path, own.data))]
                    ),
                    files(folds.name(number)), functools.partial(folds.make, self, number),
                    own.sft.steps * own.sft.batch * 0.08 + 1.5 * own.grpo.prompts + 60,
                    goes_on=True,
                )
                for number in self.folds
            ),
            Step(
                "calibrate", "limits: those of the recipe, or others from parts",
                lambda now: state.of(
                    [own.calibrate, self._in_use(), _made(now, "judge")]
                    + [self._said(), _made(now, *map(folds.name, self.folds))] * bool(self.folds)
                ),
                files("thresholds.json", "suggest"), lambda: judging.calibrate(self), 1,
            ),
            Step(
                "export", "the bundle, with its golden set",
                lambda now: state.of(
                    [own.name, own.version, own.golden, self.release, self._named_cases(),
                     _made(now, "draft", "parts", "calibrate")]
                ),
                files("bundle/manifest.json"), lambda: judging.export(self), 10 + own.golden,
            ),
            Step(
                "verify", "the bundle answers as the checkpoint does, in full precision",
                lambda now: _made(now, "export"), files("verify"),
                lambda: judging.verify(self), 20 + 0.5 * judged,
            ),
            Step(
                "certify", "the certificate, where the parts suffice",
                lambda now: state.of(
                    [own.calibrate, self._promised(), _made(now, "export", "judge"),
                     _key_of(self.key)]
                ),
                files("calibration", "bundle/certificate.json"), lambda: judging.certify(self), 2,
            ),
            Step(
                "sign", "the seal, and the bundle as one file",
                lambda now: state.of(
                    [_made(now, "export", "certify", "verify"), _key_of(self.key)]
                ),
                files(f"bundle-{self.release}.fsb", "bundle/signatures.json"),
                lambda: judging.sign(self), 1,
            ),
            Step(
                "selftest", "the sealed file, opened and tried as a station does",
                lambda now: _made(now, "sign"), files("selftest.json"),
                lambda: judging.self_test(self), 5 + own.golden,
            ),
        ]  # fmt: skip

    def _named_cases(self) -> list[str]:
        """The files of the cases that the recipe names: they are no step's, and may change."""
        return _listing(self.cases) if self.recipe.parts.cases is not None else []

    def _said(self) -> str:
        """Digest of the labels as they were given."""
        return state.of([self.recipe.parts.hold, self.evidence, *map(state.digest, self.labels)])

    def _in_use(self) -> str:
        named = self.recipe.calibrate.before
        return "" if named is None else state.digest(self.path(named) / "manifest.json")

    def _promised(self) -> str:
        named = self.recipe.calibrate.promised
        return "" if named is None else state.digest(self.path(named))

    # ------------------------------------------------------------ data

    def told(self) -> labelled.Labels:
        """The labels that count; none without a labels file."""
        if self.evidence is None:
            return labelled.Labels((), {})
        return labelled.read(self.evidence, self.labels)

    def held_back(self) -> list[labelled.Told]:
        """Labelled parts that do not train."""
        hold = self.recipe.parts.hold
        return [one for one in self.told().told if labelled.held_back(one.part, hold)]

    def learned(self, found: labelled.Labels) -> list[labelled.Told]:
        """What trains: not what is held back, and in a fold not the fold's parts."""
        return self._split(found)[0]

    def kept_out(self) -> list[labelled.Told]:
        """What a fold judges."""
        return self._split(self.told())[1]

    def _split(self, found: labelled.Labels) -> tuple[list[labelled.Told], list[labelled.Told]]:
        from training.loop import folds

        hold = self.recipe.parts.hold
        own = [one for one in found.told if not labelled.held_back(one.part, hold)]
        if not self.fold:
            return own, []
        return folds.split(own, self.fold, self.recipe.calibrate.folds)

    def take_labels(self) -> Notes:
        folder = self.out / "labels"
        folder.mkdir(parents=True)
        if self.evidence is None:
            return {"labels": "none given: synthetic parts alone"}
        found = self.told()
        training = self.learned(found)
        counts = labelled.write(training, folder)
        return {
            "trained_on": counts,
            "held_back": len(found.told) - len(training),
            "left_out": dict(found.left_out),
        }

    def synthesise(self) -> Notes:
        from training import synth
        from training.data import engine
        from training.data.pool import Recipe as Pool
        from training.data.pool import Shares

        own, folder = self.recipe.synth, self.out / "synth"
        folder.mkdir(parents=True, exist_ok=True)
        if self.recipe.data:
            return {"pools": "those of the recipe"}
        pools = {
            "sheet": (Pool("sheet", seed=own.seed, shard=own.shard), own.sheets),
            "surface": (Pool("surface", seed=own.seed, shard=own.shard), own.surfaces),
            "surface-closer": (
                Pool("surface", seed=own.seed + 1, shard=own.shard, shares=Shares(closer=1.0)),
                own.closer,
            ),
        }
        for kind in ("sheet", "surface"):
            held = Pool(kind, seed=synth.VALIDATION_SEED, shard=own.shard)  # type: ignore[arg-type]
            pools[f"{kind}-val"] = (held, own.validation)
        made = {}
        for name, (pool, count) in pools.items():
            if count:
                report = synth.fill(pool, folder / name, count, engine.serial)
                if report["failed"]:
                    raise LineError("shards failed", which=folder / name, got=report["failed"])
                made[name] = report["samples"]
        return {"pools": made}

    def _data(self, *, prompts: bool) -> Path:
        """A data folder as training takes it: links to the pools. `prompts`: those with grids, and
        of the synthetic ones no second looks, for GRPO."""
        folder = self.out / ("prompts" if prompts else "data")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        sources: list[tuple[str, Path]] = []
        for number, name in enumerate(self.recipe.data):
            for pool in sorted(self.path(name).iterdir()):
                kind, _, rest = pool.name.partition("-")
                if kind not in ("sheet", "surface") or not pool.is_dir():
                    continue
                held = rest == "val"
                if not held or number == 0:
                    plain = held or (number == 0 and not rest)
                    own = pool.name if plain else f"{kind}-{number}{rest}"
                    sources.append((own, pool))
        if not self.recipe.data:
            sources += [(pool.name, pool) for pool in sorted((self.shared / "synth").iterdir())]
        taken = (labelled.POOL,) if prompts else (labelled.POOL, labelled.CLASSES)
        sources += [(name, self.out / "labels" / name) for name in taken]
        for name, pool in sources:
            if pool.is_dir() and not (prompts and "closer" in name):
                (folder / name).symlink_to(pool.resolve())
        return folder

    # ------------------------------------------------------------ training

    def _start_digest(self) -> str:
        return "" if self.start is None else state.digest(self.start / "state.pt")

    def fine_tune(self) -> Notes:
        from training import sft
        from training.nano.sft import train

        own = self.recipe.sft
        words = [
            "--data", self._data(prompts=False), "--out", self.out / "sft", "--resume",
            "--steps", own.steps, "--batch", own.batch, "--surface", own.surface,
            "--labelled", own.labelled, "--rate", own.rate, "--decay", own.decay,
            "--every", own.state_minutes, "--validate", own.validate, "--seed", own.seed,
            "--threads", self.recipe.threads,
        ]  # fmt: skip
        if self.start is not None:
            words += ["--init", self.start / "state.pt"]
        _called(lambda: train(sft.nano_parser().parse_args([str(word) for word in words])))
        card = json.loads((self.out / "sft" / "training_card.json").read_text())
        return {"validation": card["validation"], "labelled": card["labelled"]}

    def reinforce(self) -> Notes:
        import torch

        from training.nano import grpo, trial
        from training.rewards import RewardError

        own, folder = self.recipe.grpo, self.out / "grpo"
        if not own.prompts:
            folder.mkdir(parents=True, exist_ok=True)
            return {"grpo": "left out by the recipe: grpo.prompts is 0"}
        torch.set_num_threads(self.recipe.threads)
        settings = grpo.Settings(
            prompts=own.prompts, batch=own.batch, group=own.group, rate=own.rate
        )
        try:
            done = _called(
                lambda: trial.train(
                    self._data(prompts=True), self.out / "sft", folder, settings, resume=True,
                    every=own.state_steps, validate=own.validate, alarm_gate=own.alarm_gate,
                )
            )  # fmt: skip
        except RewardError as error:
            if not (folder / "figures.json").is_file():
                raise
            return {"grpo": f"refused, the checkpoint of sft is exported: {error}"}
        return {"before": done["before"], "after": done["after"]}

    # ------------------------------------------------------------ parts

    def refer(self) -> Notes:
        from training import references

        if not self.inspected:
            return {"references": "no surface is inspected"}
        poses = references.write(self.inspected, self.out / "references.npz")
        return {"parts": len(self.inspected), "poses": poses}

    def make_parts(self) -> Notes:
        from training import cases
        from training.loop import judging

        own = self.recipe.parts
        if own.cases is not None:
            return {"cases": str(self.cases)}
        draw = cases.Draw(parts=self.inspected)
        made = 0
        for task in judging.tasks(self):
            own_draw = draw if task == "surface" else cases.PLAIN
            made += cases.write_cases(
                self.cases, [task], own.count, own.seed, 1, own_draw, quiet=self.quiet
            )
        return {"cases": str(self.cases), "made": made}


def _called(call: Callable[[], Any]) -> Any:
    """A module's own function; its exit with a message becomes an error of this step."""
    from safetensors import SafetensorError

    try:
        return call()
    except SystemExit as error:
        raise LineError("training refused", got=error.code) from error
    except SafetensorError as error:  # no OSError, also when the disk is full
        raise LineError("weights cannot be written or read", got=error) from error


def _files(out: Path, *names: str) -> tuple[Path, ...]:
    return tuple(out / name for name in names)


def _made(now: State, *names: str) -> str:
    """Digest of what steps left."""
    return state.of([record.write(dict(now.steps[n].outputs)) if n in now.steps else n
                     for n in names])  # fmt: skip


def _listing(folder: Path) -> list[str]:
    """Names and sizes of the files of a folder, links followed one level down."""
    found = []
    for item in sorted(folder.iterdir()):
        below = sorted(item.iterdir()) if item.is_dir() else [item]
        with suppress(OSError):
            found += [f"{item.name}/{one.name} {one.stat().st_size}" for one in below]
    return found


def _key_of(key: Path | None) -> str:
    return "" if key is None else private_key.public_half(private_key.read(key)).id
