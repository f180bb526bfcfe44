"""`forge-station replay`: judge stored parts again, with their own bundle or with another."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from forge_station.config import StationConfig, load_station
from forge_station.errors import BundleError, ConfigError, StationError
from forge_station.evidence import rejudge
from forge_station.evidence.case import Decider
from forge_station.evidence.folder import Folder
from forge_station.evidence.rejudge import StoredPart
from forge_station.evidence_command import add_query_arguments, query_of, settings_of
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector
from forge_station.station import gates_of
from forge_station.vlm.bundle_files import read_manifest
from forge_station.vlm.engine import AUTO, available

SAME, DIFFERS, NOT_DONE = 0, 1, 2
_PROGRESS_S = 2.0

DESCRIPTION = """\
Judge stored parts again. With the bundle that the record names (the station's own, found by its
digest, or one that --bundle gives) the verdict must come out the same, byte for byte; with another
--bundle it shows what that one would have decided.
"""
EPILOG = """\
PART is a result id, its end, or a file NAME.verdict.json or NAME.case.npz.

The own bundle is run with the settings of then: thresholds, threads, provider, certificate. Another
one is run with those of the station file, and with its own certificate as it holds today. Compared
is all but the clock: times and durations are those of the record. Another processor or another
version of ONNX Runtime may round differently; the table then shows the last digits.

Standard output: one line a part, a table of what differs (as recorded, now), then, in one line of
JSON, how many are the same, differ, could not be done, and how outcomes changed.

Exit code: 0 all the same; 1 one differs; 2 one could not be judged again (its case or its bundle is
missing) and none differs; 64 wrong usage.

Examples:
  forge-station replay --last 1
  forge-station replay 4cc4-cd44ef9b9b38 --images
  forge-station replay --all --outcome FAIL,UNSURE --bundle candidate
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("parts", nargs="*", metavar="PART", help="see below")
    parser.add_argument("--all", action="store_true", help="every part, or those asked for")
    add_query_arguments(parser)
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="a bundle, or a folder with several to find in"
    )
    parser.add_argument(
        "--images", action="store_true",
        help="begin with the pattern images: decode them, too (evidence.stacks)",
    )  # fmt: skip
    parser.add_argument("--provider", help="of ONNX Runtime (default: as recorded)")


@dataclass
class _Bench:
    """The inspectors that are open, by what they were opened with."""

    config: StationConfig | None
    given: Path | None
    provider: str | None
    stack: ExitStack
    opened: dict[tuple[object, ...], Inspector]

    def own(self, decider: Decider) -> Inspector | None:
        """The inspector of the record's bundle; None when it is not at hand."""
        places = [] if self.given is None else [self.given]
        if self.config is not None:
            places.append(self.config.bundle)
        for place in places:
            for folder in _bundles(place):
                if _digest(folder) == decider.bundle:
                    provider = self.provider or _available(decider.provider)
                    key = (folder, decider.threads, provider)
                    if key not in self.opened:
                        self._keep(
                            key, open_inspector(folder, threads=decider.threads, provider=provider)
                        )
                    return self.opened[key]
        return None

    def other(self) -> Inspector | None:
        """The inspector of --bundle, set as the station file says; None when it is not one."""
        if self.given is None or not (self.given / "manifest.json").is_file():
            return None
        key: tuple[object, ...] = ("other",)
        if key not in self.opened:
            if self.config is None:
                raise ConfigError(
                    "another bundle needs the settings of a station", expected="--station FILE"
                )
            config = self.config
            inspector = open_inspector(
                self.given,
                overrides=config.thresholds,
                threads=config.runtime.threads,
                provider=self.provider or config.runtime.provider,
                grid=config.runtime.grid,
                trusted_keys=config.trusted_keys,
                changed=config.changed_since_certificate,
            )
            self._keep(key, replace(inspector, fusion=config.fusion, gates=gates_of(config.gates)))
        return self.opened[key]

    def _keep(self, key: tuple[object, ...], inspector: Inspector) -> None:
        self.stack.callback(inspector.model.close)
        self.opened[key] = inspector


def run(args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Returns the exit code, see EPILOG. Raises StationError for what stops all of it."""
    files = _files(args)
    config = load_station(args.station) if args.station.is_file() else None
    counts: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    told_at = time.monotonic()
    with ExitStack() as stack:
        bench = _Bench(config, args.bundle, args.provider, stack, {})
        for number, file in enumerate(files, 1):
            try:
                counts[_one(bench, rejudge.load(file), args.images, changes, out)] += 1
            except StationError as error:
                counts["not done"] += 1
                print(f"{file.name}: not judged again: {error}", file=out)
            if len(files) > 1 and time.monotonic() - told_at > _PROGRESS_S:
                told_at = time.monotonic()
                print(f"{number} of {len(files)} parts", file=sys.stderr, flush=True)
    summary: dict[str, Any] = {
        "parts": len(files),
        "same": counts["same"],
        "differs": counts["differs"],
        "not_done": counts["not done"],
        "outcomes": dict(sorted(changes.items())),
    }
    print(json.dumps(summary), file=out)
    if counts["differs"]:
        return DIFFERS
    return NOT_DONE if counts["not done"] or not files else SAME


def _one(bench: _Bench, part: StoredPart, images: bool, changes: Counter[str], out: TextIO) -> str:
    """Judge one part and print its line and table; `same` or `differs`."""
    record, decider = part.verdict, part.case.decider
    given = None if bench.given is None else _digest(bench.given)
    if given in (None, decider.bundle):
        inspector = bench.own(decider)
        if inspector is None:
            raise BundleError(
                "the bundle of the record is not here",
                which=f"{decider.name} {decider.version}",
                expected=f"sha256 {decider.bundle[:16]}",
                action="give its folder with --bundle",
            )
        now = rejudge.again(part, inspector, images=images)
    else:
        inspector = bench.other()
        assert inspector is not None  # _digest has read its manifest
        now = rejudge.by_another(part, inspector, images=images)
    changes[f"{record.outcome} -> {now.outcome}"] += 1
    found = rejudge.differences(record, now)
    word = "differs" if found else "same"
    arrow = "" if record.outcome is now.outcome else f" -> {now.outcome}"
    print(f"{record.serial}  {record.product}  {record.outcome}{arrow}  {word}", file=out)
    if found:
        width = [max(len(getattr(item, name)) for item in found) for name in ("what", "before")]
        for item in found:
            print(f"    {item.what:<{width[0]}}  {item.before:<{width[1]}}  {item.now}", file=out)
    return word


def _files(args: argparse.Namespace) -> list[Path]:
    """The verdict or case files of the parts that are meant."""
    named = [Path(part) for part in args.parts]
    if named and all(path.is_file() for path in named):
        return named
    chosen = args.all or args.last
    if bool(args.parts) == bool(chosen):
        raise ConfigError("which parts?", expected="PART ..., --last N or --all")
    with Folder.of(settings_of(args)) as folder:
        rows = [folder.get(part) for part in args.parts] or folder.find(query_of(args))
        return [folder.path / row.files[0] for row in rows]


def _bundles(place: Path) -> list[Path]:
    """A bundle folder, or those in a folder or a bundle store."""
    if (place / "manifest.json").is_file():
        return [place]
    found = [*place.glob("*/manifest.json"), *place.glob("versions/*/manifest.json")]
    return sorted(path.parent for path in found)


def _digest(folder: Path) -> str | None:
    """Of a bundle; None of another folder, or of a bundle that cannot be read."""
    if not folder.is_dir():
        raise ConfigError("no such folder", which=folder, expected="a bundle")
    if not (folder / "manifest.json").is_file():
        return None
    return read_manifest(folder).sha256


def _available(provider: str) -> str:
    """The provider of then, where this machine has it."""
    if provider in available():
        return provider
    print(f"{provider} is not here: the best that is, judges", file=sys.stderr)
    return AUTO
