"""Tells an accelerator that is lost to this process from errors that cost one call alone."""

from __future__ import annotations

import torch

from ray_cluster.errors import DeviceBroken

_NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
# the runtime refuses such a call before it launches anything
_HARMLESS = (*_NO_MEMORY, "invalid argument", "invalid configuration argument", "NOT_SUPPORTED")
_DEVICE_ERRORS = ("CUDA error", "HIP error")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller batch may succeed where this one failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _NO_MEMORY)


def raise_if_broken(error: Exception) -> None:
    """Raise when every later call on the device would fail as this one did.

    After a failed device-side assertion, an illegal address or a lost device, CUDA answers every
    call with the same error until the process ends ("CUDA C++ Programming Guide", error checking).

    Raises:
        DeviceBroken: naming the error.
    """
    is_of_device = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _says(error, _DEVICE_ERRORS)
    )
    if is_of_device and not is_out_of_memory(error) and not _says(error, _HARMLESS):
        raise DeviceBroken(f"the device is lost to this process: {error}") from error


def _says(error: Exception, phrases: tuple[str, ...]) -> bool:
    text = str(error)
    return any(phrase in text for phrase in phrases)
