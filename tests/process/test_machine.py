"""What a load of a model leaves in memory."""

from __future__ import annotations

import subprocess
import sys

_BEGIN = """
import psutil
from ray_cluster.process.machine import loading_a_model

resident = lambda: psutil.Process().memory_info().rss
with loading_a_model():
"""
_FREED = """
    small = [bytearray(100_000) for _ in range(3000)]
    kept = small[::100]
    del small
    before = resident()
print(before - resident())
"""
_APART = """
    large = [bytearray(3_000_000) for _ in range(100)]
    kept = large[::10]
    before = resident()
    del large
    print(before - resident())
"""


def printed(program: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", _BEGIN + program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        # without it glibc maps these apart once it has seen some freed
        env={"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)},
    )
    return int(found.stdout)


def test_what_was_freed_between_what_is_kept_is_given_back() -> None:
    assert printed(_FREED) > 200_000_000


def test_large_weights_leave_no_holes() -> None:
    assert printed(_APART) > 200_000_000
