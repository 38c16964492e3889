"""Chooses between an op's two implementations by the device of its first tensor.

Nothing here imports Triton: an op's ``triton`` module is loaded by its first call on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Return the op that runs as Triton on CUDA tensors, and as ``reference`` on all others.

    Without Triton the reference runs on CUDA too. A Triton that is installed but broken is an
    error, not a reason to be slow in silence.

    Args:
        reference: a function whose first argument is a tensor, in a module ``<op>.reference``;
            its sibling ``<op>.triton`` has a function of the same name and signature.
    """

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = cast(Tensor, args[0] if args else next(iter(kwargs.values())))
        if not (first.is_cuda and has_triton()):
            return reference(*args, **kwargs)
        # kernels are launched on the current device, which need not be the tensors'
        with torch.cuda.device_of(first), _errors_of_triton(reference.__name__):
            return triton_twin(reference)(*args, **kwargs)

    return op


@contextmanager
def _errors_of_triton(name: str) -> Iterator[None]:
    """Turn what Triton raises into a RuntimeError, as a call of PyTorch's own that fails."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        kind = type(error).__name__
        raise RuntimeError(f"Triton cannot run {name}: {kind}: {error}") from error


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; asked once, for where it is not it takes a search."""
    return find_spec("triton") is not None


def triton_twin(reference: Callable[P, R]) -> Callable[P, R]:
    """Return the Triton implementation of a reference; raises ImportError without Triton."""
    package, _, module = reference.__module__.rpartition(".")
    assert module == "reference", f"{reference.__module__} is not an op's reference"
    twin: Any = getattr(import_module(f"{package}.triton"), reference.__name__)
    return cast(Callable[P, R], twin)
