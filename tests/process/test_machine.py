"""Freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import psutil
from ray_cluster.process.machine import return_free_memory

resident = psutil.Process().memory_info
small = [bytearray(100_000) for _ in range(3000)]
kept = small[::100]
del small
before = resident().rss
return_free_memory()
print(before - resident().rss)
"""


def test_what_was_freed_between_what_is_kept_is_given_back() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        # without it glibc maps these apart once it has seen some freed
        env={"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)},
    )
    assert int(found.stdout) > 200_000_000
