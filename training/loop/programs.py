"""Programs that the loop runs beside itself: `export` and the station, met in files only."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from training.loop.error import LineError

ROOT = Path(__file__).resolve().parents[2]
_DIE_WITH_PARENT = 1
_LIBC = ctypes.CDLL(None)


def run(module: str, *words: object) -> dict[str, Any]:
    """The JSON object that `python -m module words` ends with, {} where it ends with none.

    Its messages and progress are shown. LineError when it fails. It is killed when this process is.
    """
    command = [sys.executable, "-m", module, *map(str, words)]
    paths = [str(ROOT / "edge"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=environment, text=True, check=False,
        preexec_fn=lambda: _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        raise LineError(
            f"{module} refused",
            got=f"exit code {done.returncode}, with the message above: {' '.join(said[-2:])[:400]}",
            action=f"see {' '.join(command[1:])}",
        )
    try:
        found = json.loads(said[-1]) if said else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
