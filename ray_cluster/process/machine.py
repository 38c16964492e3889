"""What machine this is, in words, and the memory that a process gives back to it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# of mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LEAST_WEIGHTS_BYTES = 1 << 20
_MOST_OF_HEAP_BYTES = 32 << 20


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


@contextmanager
def loading_a_model() -> Iterator[None]:
    """Keep the C library's memory without holes; nothing happens where it is no glibc.

    A load leaves up to a third of a model there: its files' numbers in another format. And weights
    that lie among them keep apart what is freed, so that steps take new memory for what would have
    fitted: each is mapped by itself meanwhile. Afterwards the bounds are those that glibc comes to
    by itself, and no others, as it no longer moves them once one is set.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_MMAP_THRESHOLD, _LEAST_WEIGHTS_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _MOST_OF_HEAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MOST_OF_HEAP_BYTES)
        libc.malloc_trim(0)
