"""What Python's garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Start up within this without garbage collections; what is alive at the end is never walked.

    Importing torch and diffusers makes about a million objects, and all of them stay: the full
    collections that they set off take a third of the import's time, and each later one would walk
    through all of them again, in the middle of a denoising step. Garbage in cycles that was made
    until the end stays in memory: for the start of a process, not for its work.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
