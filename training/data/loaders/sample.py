"""What a loader hands on: samples with pictures, and the list of what could not be loaded."""

from __future__ import annotations

import io
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from forge_station.contract.error import ContractError, Fault
from forge_station.contract.manifest import ClassName, PartName
from training.data.examples import Message

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
_KEPT = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}
_ORIENTATION = 0x0112
_SHOWN = 20


class LoadError(ContractError):
    """Data that cannot become an example: names the file and the field."""


@dataclass(frozen=True)
class Picture:
    """A picture file, or its bytes; `which` names it in errors."""

    source: Path | bytes
    which: str = ""

    @property
    def name(self) -> str:
        return self.which or (self.source.name if isinstance(self.source, Path) else "picture")

    def size(self) -> tuple[int, int]:
        """(height, width) as seen, read from the header."""
        with self._opened() as image:
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return (image.width, image.height) if turned else (image.height, image.width)

    def decoded(self) -> Image.Image:
        """The whole picture, upright, in mode L or RGB; LoadError for a truncated file."""
        with self._opened() as image:
            try:
                upright = ImageOps.exif_transpose(image)
                return upright if upright.mode in ("L", "RGB") else _plain(upright)
            except (OSError, ValueError, SyntaxError) as error:
                raise LoadError(
                    "picture cannot be decoded", which=self.name, got=error,
                    action="replace the file; it may be truncated",
                ) from error  # fmt: skip

    def content(self) -> tuple[str, bytes]:
        """(suffix, bytes) to store: the file itself, or PNG if it must be turned or made 8 bit."""
        with self._opened() as image:
            suffix = _KEPT.get(image.format or "")
            upright = image.getexif().get(_ORIENTATION, 1) == 1
            if suffix and upright and image.mode in ("L", "RGB", "RGBA"):
                raw = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
                return suffix, raw
        buffer = io.BytesIO()
        self.decoded().save(buffer, "PNG")
        return ".png", buffer.getvalue()

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        try:
            source = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source
            image = Image.open(source)
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise LoadError(
                "picture cannot be opened", which=self.name, expected="JPEG, PNG, BMP, TIFF, WebP",
                got="an empty or foreign file" if "identify" in str(error) else error,
            ) from error  # fmt: skip
        with image:
            yield image


def _plain(image: Image.Image) -> Image.Image:
    """16 bit -> 8 bit by its range of 65535; palettes and CMYK -> RGB; alpha is dropped."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return image.convert("L" if image.mode in ("1", "LA", "F") else "RGB")


@dataclass(frozen=True)
class Sample:
    """One example before it has a split and picture paths.

    `labels` are what splits balance and reports count; `clean`: nothing is wrong with it.
    """

    id: str
    pictures: tuple[Picture, ...]
    messages: tuple[Message, ...]
    group: str
    labels: tuple[str, ...]
    clean: bool = False
    weight: float = 1.0


@dataclass
class Problems:
    """Everything that could not be loaded, told at once. `skip`: go on without it."""

    skip: bool = False
    faults: list[Fault] = field(default_factory=list)

    @contextmanager
    def of(self, which: object) -> Iterator[None]:
        """Note a LoadError of the block under the name of a file and go on."""
        try:
            yield
        except LoadError as error:
            place = str(which) if error.which in (None, which) else f"{which}: {error.which}"
            got = error.what if error.got is None else f"{error.what}, got {error.got}"
            allowed = error.expected if error.expected is not None else error.action
            self.faults.append(Fault(place, got, str(allowed or "a readable entry")))

    def finish(self) -> None:
        """Raise LoadError with all faults, unless they are to be skipped."""
        if self.faults and not self.skip:
            more = len(self.faults) - _SHOWN
            raise LoadError(
                f"{len(self.faults)} entries cannot be loaded"
                + (f" (the first {_SHOWN})" if more > 0 else ""),
                action="correct them, or pass --skip-bad to go on without them",
                faults=self.faults[:_SHOWN],
            )


@dataclass(frozen=True)
class Loaded:
    """A loader's result; `figures` go into the command's JSON."""

    source: str
    samples: Sequence[Sample]
    figures: dict[str, Any] = field(default_factory=dict)


def inside(folder: Path, name: object, which: str) -> Path:
    """A file named by an annotation, which must lie in `folder`: no absolute path, no `..`."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise LoadError("not a file name", which=which, expected="a relative path", got=repr(name))
    flat = PurePosixPath(name.replace("\\", "/"))
    if flat.is_absolute() or PureWindowsPath(name).drive or ".." in flat.parts:
        raise LoadError(
            "path leaves the folder", which=which, expected="a relative path without ..", got=name
        )
    path = folder / flat
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LoadError("path leaves the folder through a link", which=which, got=name)
        found = path.is_file()
    except OSError:  # a name longer than the file system allows
        found = False
    if not found:
        raise LoadError("no such file", which=which, expected=f"a file in {folder}", got=name[:200])
    return path


def pictures_in(folder: Path, suffixes: Sequence[str] = PICTURE_SUFFIXES) -> list[Path]:
    """Picture files below a folder, sorted, hidden ones left out; LoadError if there is none."""
    if not folder.is_dir():
        raise LoadError("no such folder", which=folder, expected="a folder of pictures")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise LoadError("no pictures", which=folder, expected=f"files {', '.join(suffixes)}")
    return found


def sample_id(folder: Path, path: Path) -> str:
    """`MT_Crack-exp1_num_4` of MT_Crack/exp1_num_4.jpg: unique below the folder."""
    relative = path.relative_to(folder).with_suffix("")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(relative.parts))


def word(text: str) -> str:
    """A class or part name as the model writes it: lower case, no spaces, no colon."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def class_name(text: str) -> str:
    """A defect class that a bundle can carry; LoadError else."""
    return _checked(ClassName, text, "class", "rename it with --classes OLD=new")


def part_name(text: str) -> str:
    """What can stand at a mark, as a bundle can carry it; LoadError else."""
    return _checked(PartName, text, "part", "give it another name")


def _checked(kind: Any, text: str, which: str, action: str) -> str:
    (limit,) = typing.get_args(kind)[1:]
    allowed = limit.violated_by(text)
    if allowed:
        raise LoadError("not a name", which=which, expected=allowed, got=repr(text), action=action)
    return text


class Grouping:
    """Which pictures must not be divided between splits, from their path.

    `pattern` searches the relative path. Its group `group` is the name; its group `run` is a
    running number of the camera: pictures whose numbers differ by `gap` or less from the next
    belong to one run. Without a pattern each picture is a group of its own.
    """

    def __init__(self, pattern: str | None, gap: int = 0) -> None:
        try:
            self.pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise LoadError("not a regular expression", which="--group", got=error) from error
        names = self.pattern.groupindex if self.pattern else {}
        if self.pattern and not {"group", "run"} & set(names):
            raise LoadError(
                "names nothing", which="--group", got=pattern,
                expected="a named group (?P<group>...) or (?P<run>[0-9]+)",
            )  # fmt: skip
        self.gap = gap

    def names(self, paths: Sequence[str]) -> dict[str, str]:
        """Relative path -> group."""
        if self.pattern is None:
            return {path: str(Path(path).with_suffix("")) for path in paths}
        keys: dict[str, tuple[str, int | None]] = {}
        for path in paths:
            found = self.pattern.search(path)
            if found is None:
                wanted = f"text that matches {self.pattern.pattern}"
                raise LoadError("no group in a name", which=path, expected=wanted)
            parts = found.groupdict()
            run = parts.get("run")
            keys[path] = (parts.get("group") or "", int(run) if run is not None else None)
        out: dict[str, str] = {}
        last: tuple[str, int] | None = None
        name = ""
        for path, (group, run) in sorted(
            keys.items(), key=lambda item: (item[1][0], item[1][1] or 0)
        ):
            if run is None:
                out[path] = group
                continue
            if last is None or last[0] != group or run - last[1] > self.gap:
                name = f"{group}-run{run}" if group else f"run{run}"
            last = (group, run)
            out[path] = name
        return out
