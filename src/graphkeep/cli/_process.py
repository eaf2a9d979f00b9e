"""What a process that is measured needs: its own peak, and an allocator that does not roll dice."""

from __future__ import annotations

import sys
from pathlib import Path

# Environment of a child that is timed. glibc gives freed memory back to the system or keeps it, by the luck of the heap's
# layout, and fetching it again costs as much as a backward: without this the same step takes 0.13 s in one process and 0.26 s
# in the next. Other allocators ignore it.
STEADY_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def process_peak() -> int:
    """Peak resident bytes of this process.

    On Linux it is ``VmHWM``, what ``ru_maxrss`` means without its trap: the kernel carries ``ru_maxrss`` over from the parent
    when a child starts, so a small child of a large parent would report its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
