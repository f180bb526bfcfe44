"""Pattern-stack folders (PNG, manifest.yaml, calibrations) and the driver that replays them.

Does not decode. Layout of one scan, all paths relative to manifest.yaml:

    manifest.yaml            schema, per stack: name, calibration file and digest, exposures, image
    files with sha256 <stack>/e0_00.png ...    8-bit grey, exposure and pattern number
    <stack>/calibration.yaml

A folder without manifest (images of another tool) is read by `read_images`, with the calibration
given by the caller.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from forge_station.capture import calibration_io, files
from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.errors import CaptureError, InputError

SCHEMA = 1
MANIFEST = "manifest.yaml"
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Recording:
    """One scan read from disk: a stack per head pose and the calibrations they name, by digest."""

    stacks: tuple[PatternStack, ...]
    calibrations: Mapping[str, Calibration]


def write(
    folder: Path, stacks: Sequence[PatternStack], calibrations: Mapping[str, Calibration]
) -> None:
    """Write one scan so that `read` returns it bit for bit.

    Stack names become folder names and must differ.
    """
    names = [stack.name for stack in stacks]
    if len(set(names)) != len(names) or not all(_is_plain(name) for name in names):
        raise InputError(
            f"recording {folder}: stack names {names} must be different plain names (letters, "
            "digits, _ - .)"
        )
    entries = []
    for stack in stacks:
        if stack.calibration_digest not in calibrations:
            raise InputError(
                f"recording {folder}: no calibration {stack.calibration_digest[:12]} for stack "
                f"{stack.name}"
            )
        place = folder / stack.name
        place.mkdir(parents=True, exist_ok=True)
        calibration_io.save(calibrations[stack.calibration_digest], place / "calibration.yaml")
        images = []
        for e, exposure in enumerate(stack.images):
            for n, image in enumerate(exposure):
                ok, data = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 1])
                if not ok:
                    raise InputError(
                        f"recording {folder}: image {n} of stack {stack.name} cannot be written "
                        "as PNG"
                    )
                content = data.tobytes()
                path = place / f"e{e}_{n:02d}.png"
                files.write(path, content)
                images.append(
                    {
                        "file": f"{stack.name}/{path.name}",
                        "sha256": hashlib.sha256(content).hexdigest(),
                    }
                )
        entries.append(
            {
                "name": stack.name,
                "calibration": f"{stack.name}/calibration.yaml",
                "calibration_digest": stack.calibration_digest,
                "pattern_digest": stack.pattern.digest,
                "exposures": [float(x) for x in stack.exposures],
                "images": images,
                "meta": {str(k): str(v) for k, v in stack.meta.items()},
            }
        )
    text = yaml.safe_dump({"schema": SCHEMA, "stacks": entries}, sort_keys=False, width=200)
    files.write(folder / MANIFEST, text.encode())


def read(folder: Path) -> Recording:
    """Read one scan.

    Raises InputError naming file and field for anything missing, malformed, truncated or altered.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise InputError(
            f"recording {folder}: no {MANIFEST}; expected a folder written by capture.replay"
        )
    try:
        raw = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"recording {manifest}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"recording {manifest}: not YAML ({error})") from None
    entries = _check_manifest(raw, manifest)
    stacks, calibrations = [], {}
    for k, entry in enumerate(entries):
        where = f"{manifest}: stacks[{k}]"
        calibration = calibration_io.load(folder / entry["calibration"])
        if calibration.digest != entry["calibration_digest"]:
            raise InputError(
                f"{where}.calibration_digest: images were taken with "
                f"{entry['calibration_digest'][:12]}, "
                f"{entry['calibration']} is {calibration.digest[:12]}; restore the calibration of "
                "that day"
            )
        if calibration.pattern.digest != entry["pattern_digest"]:
            raise InputError(
                f"{where}.pattern_digest: images show another pattern than {entry['calibration']} "
                "describes "
                f"(code step {calibration.pattern.code_step})"
            )
        count, exposures = calibration.pattern.image_count, entry["exposures"]
        if len(entry["images"]) != count * len(exposures):
            raise InputError(
                f"{where}.images: {len(entry['images'])} files, expected {count} patterns x "
                f"{len(exposures)} exposures"
            )
        paths = [folder / image["file"] for image in entry["images"]]
        digests = [image.get("sha256") for image in entry["images"]]
        stacks.append(
            read_images(
                paths,
                calibration,
                exposures=tuple(exposures),
                name=entry["name"],
                sha256=digests,
                meta=entry.get("meta", {}),
            )
        )
        calibrations[calibration.digest] = calibration
    return Recording(tuple(stacks), calibrations)


def read_images(
    paths: Sequence[Path],
    calibration: Calibration,
    *,
    exposures: tuple[float, ...] = (1.0,),
    name: str = "",
    sha256: Sequence[str | None] | None = None,
    meta: Mapping[str, str] | None = None,
) -> PatternStack:
    """Images in the order exposure by exposure, pattern by pattern -> stack.

    Raises InputError naming the file.
    """
    count = calibration.pattern.image_count
    if len(paths) != count * len(exposures):
        raise InputError(
            f"images of {name or (paths[0].parent if paths else 'nothing')}: {len(paths)} files, "
            f"expected {count} patterns x {len(exposures)} exposures"
        )
    width, height = calibration.camera.image_size
    images = np.empty((len(paths), height, width), np.uint8)
    for k, path in enumerate(paths):
        image = _read_png(path, None if sha256 is None else sha256[k])
        if image.shape != (height, width):
            raise InputError(
                f"{path}: pattern image {k} is {image.shape[1]}x{image.shape[0]}, "
                f"calibration {calibration.name} expects {width}x{height}"
            )
        images[k] = image
    return PatternStack(
        images=images.reshape(len(exposures), count, height, width),
        exposures=exposures,
        pattern=calibration.pattern,
        calibration_digest=calibration.digest,
        name=name,
        meta={} if meta is None else dict(meta),
    )


class ReplayScanner:
    """Driver that hands out recorded scans in name order.

    `folder` has a manifest itself, or its sub-folders have.
    mode "once": CaptureError after the last; "loop": starts again. Scans are read when asked for.
    """

    def __init__(self, folder: Path, mode: Literal["once", "loop"] = "loop") -> None:
        if (folder / MANIFEST).is_file():
            self._folders = [folder]
        else:
            self._folders = sorted(p.parent for p in folder.glob(f"*/{MANIFEST}"))
        if not self._folders:
            raise InputError(f"replay {folder}: neither {MANIFEST} nor sub-folders with one")
        self._mode, self._next, self._closed = mode, 0, False
        self._calibrations: dict[str, Calibration] = {}

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """Those of the scans handed out so far."""
        return self._calibrations

    @property
    def finished(self) -> bool:
        """Mode once: every scan was handed out."""
        return self._next >= len(self._folders)

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        """The next recorded scan, whatever the trigger says.

        Raises InputError for a damaged one, and goes on after it.
        """
        if self._closed:
            raise CaptureError("replay: the scanner is closed")
        if self._next >= len(self._folders):
            raise CaptureError(
                f"replay: all {len(self._folders)} recorded scans were handed out (mode once)"
            )
        folder = self._folders[self._next]
        self._next += 1
        if self._mode == "loop":
            self._next %= len(self._folders)
        recording = read(folder)
        self._calibrations.update(recording.calibrations)
        return list(recording.stacks)

    def close(self) -> None:
        """Nothing to release; later captures are refused."""
        self._closed = True


def _is_plain(name: str) -> bool:
    return bool(name) and not name.startswith(".") and all(c.isalnum() or c in "_-." for c in name)


def _leaves(name: str) -> bool:
    """Whether a path of a manifest names something outside of its folder."""
    return ".." in Path(name).parts or Path(name).is_absolute()


def _read_png(path: Path, sha256: str | None) -> NDArray[np.uint8]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: pattern image missing; capture or copy it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not data.startswith(_PNG_START):
        raise InputError(f"{path}: not a PNG file ({len(data)} bytes)")
    if not data.endswith(_PNG_END):
        raise InputError(f"{path}: truncated PNG ({len(data)} bytes, no end mark); copy it again")
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(
            f"{path}: content differs from the sha256 in {MANIFEST}; the image was changed after "
            "recording"
        )
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:  # it claims to be larger than OpenCV reads
        raise InputError(f"{path}: damaged PNG ({error.err})") from None
    if image is None:
        raise InputError(f"{path}: damaged PNG ({len(data)} bytes)")
    if image.dtype != np.uint8:
        raise InputError(f"{path}: {image.dtype} image, expected 8 bit")
    if image.ndim == 3:
        image = cv2.cvtColor(
            image, cv2.COLOR_BGRA2GRAY if image.shape[2] == 4 else cv2.COLOR_BGR2GRAY
        )
    return np.asarray(image, np.uint8)


def _check_manifest(raw: Any, manifest: Path) -> list[dict[str, Any]]:
    """Every entry complete and of the right type, or one InputError with all problems."""
    problems: list[str] = []
    required: dict[str, type] = {
        "name": str,
        "calibration": str,
        "calibration_digest": str,
        "pattern_digest": str,
        "exposures": list,
        "images": list,
    }
    entries = raw.get("stacks") if isinstance(raw, dict) else None
    if not isinstance(raw, dict):
        problems.append("not a mapping")
    else:
        if raw.get("schema") != SCHEMA:
            problems.append(f"schema: expected {SCHEMA}, got {raw.get('schema')!r}")
        problems += [f"{key}: unknown key" for key in raw if key not in ("schema", "stacks")]
        if not isinstance(entries, list) or not entries:
            problems.append("stacks: expected a list with at least one entry")
    for k, entry in enumerate(entries if isinstance(entries, list) else []):
        where = f"stacks[{k}]"
        if not isinstance(entry, dict):
            problems.append(f"{where}: not a mapping")
            continue
        problems += [
            f"{where}.{key}: unknown key" for key in entry if key not in (*required, "meta")
        ]
        for key, kind in required.items():
            if not isinstance(entry.get(key), kind):
                problems.append(f"{where}.{key}: expected {kind.__name__}, got {entry.get(key)!r}")
        for n, image in enumerate(entry["images"] if isinstance(entry.get("images"), list) else []):
            if not isinstance(image, dict) or not isinstance(image.get("file"), str):
                problems.append(f"{where}.images[{n}].file: missing")
            elif set(image) - {"file", "sha256"}:
                problems.append(
                    f"{where}.images[{n}]: unknown key "
                    f"{', '.join(sorted(set(image) - {'file', 'sha256'}))}"
                )
            elif not isinstance(image.get("sha256", ""), str):
                problems.append(
                    f"{where}.images[{n}].sha256: expected text, got {image['sha256']!r}"
                )
            elif _leaves(image["file"]):
                problems.append(f"{where}.images[{n}].file: {image['file']} leaves the folder")
        calibration = entry.get("calibration")
        if isinstance(calibration, str) and _leaves(calibration):
            problems.append(f"{where}.calibration: {calibration} leaves the folder")
        if not isinstance(entry.get("meta", {}), dict):
            problems.append(f"{where}.meta: expected dict, got {entry['meta']!r}")
        exposures = entry.get("exposures")
        if isinstance(exposures, list) and not (
            exposures
            and all(
                isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf
                for x in exposures
            )
        ):
            problems.append(
                f"{where}.exposures: expected finite numbers above 0, got {exposures!r}"
            )
    if problems:
        raise InputError(f"recording {manifest}: " + "; ".join(problems[:12]))
    return list(entries or [])
