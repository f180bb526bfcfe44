"""How the C heap of a process that runs for months is kept.

glibc gives each thread a heap of its own and maps and returns large blocks by a threshold that
moves. With a model's threads and a scan's arrays of tens of MB every heap fragments by itself, and
the resident memory climbs in steps for thousands of parts. One heap that is not given back reaches
its size within the first parts: over 96 parts of 12 scans it grew by 0.3 and 0.8 MB against 17.8
and 17.6, the peak was 5 % lower, and no stage was slower (`forge-station bench`, in turn). On trays
that all differ it still climbs in steps (docs/DEPLOY.md, "An hour of soak").
"""

from __future__ import annotations

import ctypes
import sys

# malloc.h of glibc
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc takes no more on 64 bits. Blocks above are mapped one by one, and returned when freed."""
_NEVER = (1 << 31) - 1


def settle() -> bool:
    """One heap for all threads, kept. Before the first thread; False: not glibc, nothing done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, or another allocator was loaded before
        return False
    wanted = (
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, _NEVER),
    )
    return all(mallopt(name, value) == 1 for name, value in wanted)
