"""Tells an accelerator that is lost to this process from errors that cost one call alone."""

from __future__ import annotations

import torch

from ray_cluster.errors import DeviceBroken

_NO_MEMORY = (
    "out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
# the runtime or a library refuses such a call before it launches anything
_HARMLESS = (
    *_NO_MEMORY,
    "invalid argument",
    "invalid configuration argument",
    "NOT_SUPPORTED",
    "BAD_PARAM",
    "INVALID_VALUE",
    "out of resource",
)
# what PyTorch says of the runtime; whatever else follows, every later call says it too
_DEVICE_ERRORS = ("CUDA error", "HIP error")
# the reasons for that in the runtime's and the driver's words, as Triton and cuDNN pass them on
_LOST = (
    "illegal memory access",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "device-side assert",
    "CUDA_ERROR_ASSERT",
    "unspecified launch failure",
    "CUDA_ERROR_LAUNCH_FAILED",
    "misaligned address",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "illegal instruction",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "invalid program counter",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ECC error",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "GPU has fallen off the bus",
    "CUDA_ERROR_DEINITIALIZED",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller batch may succeed where this one failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _NO_MEMORY)


def raise_if_broken(error: Exception) -> None:
    """Raise when every later call on the device would fail as this one did.

    After a failed device-side assertion, an illegal address or a lost device, CUDA answers every
    call with the same error until the process ends ("CUDA C++ Programming Guide", error checking).
    What a library's words do not tell, the device is asked for.

    Raises:
        DeviceBroken: naming the error.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error) or _says(error, _HARMLESS):
        return
    is_of_device = isinstance(error, torch.AcceleratorError) or _says(error, _DEVICE_ERRORS)
    if is_of_device or _says(error, _LOST):
        raise DeviceBroken(f"the device is lost to this process: {error}") from error
    if (answer := _error_of_device()) is not None:
        raise DeviceBroken(f"the device is lost to this process: {answer}; {error}") from error


def _error_of_device() -> RuntimeError | None:
    """Wait for all that was launched; return what the device says if it is lost."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return None if is_out_of_memory(error) else error
    return None


def _says(error: Exception, phrases: tuple[str, ...]) -> bool:
    text = str(error)
    return any(phrase in text for phrase in phrases)
