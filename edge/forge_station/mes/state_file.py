"""Small facts that must outlive the process, as a JSON file that appears whole or not at all.

It does not know what the facts are (`alarms`: what is wrong now, `sparkplug`: how often born).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def read(path: Path) -> dict[str, Any]:
    """The facts; empty when there is no file yet, or (with a word in the log) a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.error("%s cannot be read and is begun anew: %s", path, error)
        return {}
    if not isinstance(content, dict):
        log.error("%s is no JSON object and is begun anew", path)
        return {}
    return content


def write(path: Path, facts: Mapping[str, Any]) -> None:
    """Replace the file: written beside it, flushed to disk, renamed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(facts, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
