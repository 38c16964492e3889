"""What machine this is, in words, and the memory that a process gives back to it."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def return_free_memory() -> None:
    """Give the system what the C library has of freed memory; nothing happens where it is no glibc.

    A loaded model leaves up to a third of its size there: its files' numbers in another format.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
