"""Garbage collection during start-up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection during start-up, then freezes what survives.

    Importing torch and diffusers makes about a million lasting objects: full collections meanwhile
    take a third of the import's time, and each later one would walk through all of them in the
    middle of a denoising step. Cyclic garbage from the block stays in memory for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
