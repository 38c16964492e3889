"""Which number format a model runs in where its configuration names none."""

from __future__ import annotations

from typing import Literal

NumberFormat = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
Capability = tuple[int, int]
"""CUDA's compute capability, such as (8, 0)."""

# older cards emulate bfloat16
_FIRST_WITH_BFLOAT16 = (8, 0)


def default_format(device: Device, capability: Capability | None) -> NumberFormat | None:
    """Return the format that a device is fast and safe with; None for a GPU that is not known.

    bfloat16 has float32's range, so that nothing overflows and no layer is kept in float32.
    """
    if device == "cpu":
        return "float32"
    if capability is None:
        return None
    return "bfloat16" if capability >= _FIRST_WITH_BFLOAT16 else "float16"
