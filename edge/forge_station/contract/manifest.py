"""The manifest of a model bundle: what is in it, for which contract, and whether it is intact.

It does no I/O: the caller reads the bytes. Signatures are in `seal.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal

from forge_station.contract import CONTRACT_VERSION, record, tasks
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit
from forge_station.contract.views import CHANNELS, SURFACE_CHANNELS, VISION_TOKEN_PX

MANIFEST_NAME = "manifest.json"
GOLDEN = ("golden.json", "golden.npz")
"""The golden set: it tests what decides, and is no part of it."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){0,3}")
_MAX_FILES = 200
_SAYS_NOTHING_OF_THE_MODEL = ("name", "version", "release_counter", "training", "created", "line")


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: lower-case hex SHA-256 and size in bytes."""

    sha256: Annotated[str, Limit(pattern="[0-9a-f]{64}", meaning="64 lower-case hex digits")]
    size: Count

    def __post_init__(self) -> None:
        record.check(self)

    @classmethod
    def of(cls, content: bytes) -> FileEntry:
        return cls(hashlib.sha256(content).hexdigest(), len(content))


_CLASS_NAME = Limit(pattern="[a-z][a-z_]{0,31}", meaning="1 to 32 lower-case letters or _")
_PART_NAME = Limit(pattern=r"\w[\w.-]{0,31}( \w[\w.-]{0,31}){0,3}", meaning="1 to 4 words")
ClassName = Annotated[str, _CLASS_NAME]
PartName = Annotated[str, _PART_NAME]


@dataclass(frozen=True)
class Vocabulary:
    """What the model may answer on its line. The default is that of the three scan checks."""

    classes: tuple[ClassName, ...] = tasks.SURFACE_CLASSES
    """Surface classes; `normal`, the clean one, is among them."""
    parts: tuple[PartName, ...] = ()
    """What can stand at a mark, `none` for an empty place; empty: the parts of the catalogue."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if tasks.NORMAL not in self.classes or len(self.classes) < 2:
            allowed = f"{tasks.NORMAL} and one defect class or more"
            faults.append(Fault("classes", ", ".join(self.classes) or "none", allowed))
        for name, words, limit in (
            ("classes", self.classes, _CLASS_NAME),
            ("parts", self.parts, _PART_NAME),
        ):
            if len(set(words)) != len(words):
                faults.append(Fault(name, ", ".join(words), "each word once"))
            wrong = ((word, limit.violated_by(word)) for word in words)
            faults += [Fault(name, repr(word), allowed) for word, allowed in wrong if allowed]
        if faults:
            raise ContractError("the vocabulary is not valid", faults=faults)


@dataclass(frozen=True)
class PhotoInput:
    """The picture that a model trained on photos takes: size in pixels and what its channels are.

    `rgb`: the colours. `detail`: of a grey surface the grey value, the local contrast and the fine
    detail. `where`: grey, and how far right and how far down a pixel is (`geometry.photo`).
    """

    height: int
    width: int
    channels: Literal["rgb", "detail", "where"] = "rgb"

    def __post_init__(self) -> None:
        record.check(self)
        faults = [
            Fault(name, str(value), f"a multiple of {VISION_TOKEN_PX} px, at most 2044")
            for name, value in (("height", self.height), ("width", self.width))
            if value % VISION_TOKEN_PX or not 0 < value <= 2044
        ]
        if faults:
            raise ContractError("the photo input is not valid", faults=faults)


@dataclass(frozen=True)
class Manifest:
    """A bundle's description. `release_counter` only ever grows: it guards against roll-back."""

    name: Annotated[str, Limit(pattern="[a-z0-9][a-z0-9._-]{0,63}", meaning="a lower-case name")]
    version: Annotated[str, Limit(pattern=r"\d+\.\d+\.\d+.*", meaning="a version like 1.0.0")]
    release_counter: Count
    contract_version: int
    precision: str
    """Of the weights: fp32, fp16, int8 or w4a16."""
    files: Mapping[str, FileEntry]
    """Relative path with forward slashes -> entry; the manifest itself is not listed."""
    images: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Picture kind ("sheet", "surface") -> (height, width) in pixels the model was made for."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens and vocabulary ("vocab_size", "image_pad", "eos") -> number."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the network that the runtime needs (patch, merge, window, heads, layers...)."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Name -> the operating point the model was released with; a station may override it."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the training card: data, steps, evaluation results with intervals."""
    created: str = ""
    """RFC 3339, UTC."""
    line: str = ""
    """Product line it was made for; empty: any."""
    surface_channels: tuple[str, str, str] = CHANNELS
    """What a surface picture shows; with `difference` every inspected part needs a reference."""
    vocabulary: Vocabulary = Vocabulary()
    photo: PhotoInput | None = None
    """Not None: trained and released for photos. None: what it reads on a photo decides nothing."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if self.contract_version != CONTRACT_VERSION:
            allowed = f"{CONTRACT_VERSION}: export the bundle again with this release"
            faults.append(Fault("contract_version", str(self.contract_version), allowed))
        if self.surface_channels not in (CHANNELS, SURFACE_CHANNELS):
            allowed = " or ".join(", ".join(known) for known in (CHANNELS, SURFACE_CHANNELS))
            faults.append(Fault("surface_channels", ", ".join(self.surface_channels), allowed))
        if not 0 < len(self.files) <= _MAX_FILES:
            faults.append(Fault("files", f"{len(self.files)} files", f"1 to {_MAX_FILES} files"))
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
                allowed = "a relative path inside the bundle, forward slashes, no . or .. part"
                faults.append(Fault(f"files.{name}", "not a name for a bundle file", allowed))
        if faults:
            raise ContractError("the manifest is not valid", which=self.name, faults=faults)

    @cached_property
    def sha256(self) -> str:
        """Digest of the canonical manifest: names the bundle, since it holds all file digests."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def model_sha256(self) -> str:
        """Digest of what decides: all but names, dates, model card and line. A certificate holds
        for it, so that a card can be written anew, and no graph or operating point changed."""
        data = {
            item.name: record.write(getattr(self, item.name))
            for item in fields(self)
            if item.name not in _SAYS_NOTHING_OF_THE_MODEL and not _is_default(self, item)
        }
        files = data["files"].items()
        data["files"] = {
            name: entry
            for name, entry in files
            if not name.endswith((".md", ".yaml")) and name not in GOLDEN
        }
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, one line each, UTF-8, newline at the end."""
        text = json.dumps(record.write(self), indent=1, sort_keys=True, ensure_ascii=False)
        return f"{text}\n".encode()


def parse(content: bytes, which: str = MANIFEST_NAME) -> Manifest:
    """The manifest from the bytes of its file. Raises ContractError with every problem.

    `which` names the file in messages.
    """
    try:
        data = json.loads(content.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ContractError(
            "the manifest is not JSON",
            which=which,
            got=str(error),
            action="the bundle is truncated or edited; copy it again",
        ) from error
    try:
        return record.read(Manifest, data)
    except ContractError as error:
        raise ContractError(
            "the manifest is not valid", which=which, faults=error.faults
        ) from error


def verify(manifest: Manifest, name: str, content: bytes) -> None:
    """Raise ContractError unless `content` is exactly the file `name` that the manifest lists."""
    verify_digest(manifest, name, len(content), hashlib.sha256(content).hexdigest())


def verify_digest(manifest: Manifest, name: str, size: int, sha256: str) -> None:
    """As `verify`, for a caller that hashed a large file in pieces. `size` in bytes."""
    entry = manifest.files.get(name)
    which = f"{manifest.name}: {name}"
    if entry is None:
        listed = ", ".join(sorted(manifest.files))
        raise ContractError("file is not part of the bundle", which=which, expected=listed)
    if size != entry.size:
        raise ContractError(
            "bundle file has the wrong size",
            which=which,
            expected=f"{entry.size} bytes",
            got=f"{size} bytes",
            action="the bundle is truncated or edited; copy it again",
        )
    if sha256 != entry.sha256:
        raise ContractError(
            "bundle file was changed",
            which=which,
            expected=f"sha256 {entry.sha256[:16]}...",
            got=f"{sha256[:16]}...",
            action="the bundle is edited or damaged; copy it again",
        )


def verify_all(manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Verify every listed file and that there is no other; ContractError with all faults."""
    faults = []
    for name in sorted({*manifest.files, *contents}):
        if name not in contents:
            faults.append(Fault(name, "missing", "the file as released"))
            continue
        try:
            verify(manifest, name, contents[name])
        except ContractError as error:
            faults.append(Fault(name, f"{error.what}, {error.got}", str(error.expected)))
    if faults:
        raise ContractError("the bundle is not intact", which=manifest.name, faults=faults)


def _is_default(manifest: Manifest, item: Field[Any]) -> bool:
    """Left out of `model_sha256`: a field that a later release adds voids no certificate."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return default is not MISSING and getattr(manifest, item.name) == default


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: a key that is given twice is an error, where plain JSON keeps the last."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise json.JSONDecodeError(f"key given twice: {', '.join(twice)}", "", 0)
    return result
