"""One heap for all threads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, sys, threading
from forge_station import heap

settled = heap.settle() if sys.argv[1] == "settled" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(6)


def allocate():
    together.wait()
    for _ in range(200):
        libc.malloc(1000)
    together.wait()


threads = [threading.Thread(target=allocate) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
print(settled)
"""


def heaps(how: str, told: Path) -> tuple[str, int]:
    """What `settle` answered, and the heaps of six threads that allocate at once."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(told)], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip(), told.read_text().count("<heap nr=")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_threads_share_one_heap(tmp_path: Path) -> None:
    before = heaps("not", tmp_path / "before.xml")
    after = heaps("settled", tmp_path / "after.xml")
    if after[0] == "False":
        pytest.skip("not glibc, or another allocator")
    assert before[1] > 1
    assert after == ("True", 1)
