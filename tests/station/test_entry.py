"""Ctrl-C at the command `forge-station`, in the second before there is anything to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

BODY = """
import os, signal, sys
from forge_station.__main__ import main

class Key:
    '''Ctrl-C when the first library is loaded.'''
    def find_spec(self, name, path=None, target=None):
        if name == "cv2":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
sys.meta_path.insert(0, Key())
code = main()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("handler", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 64)]
)
def test_ctrl_c_while_libraries_load_ends_quietly_and_ignored_it_stays_ignored(
    handler: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BODY, handler, "run", "--station", "/nowhere/station.yaml"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (code > 0), done.stderr
