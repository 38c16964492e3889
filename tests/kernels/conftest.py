"""Both implementations of an op. Triton runs on the GPU, and without one in its interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.ops import Ops


def triton_device() -> str:
    """Where Triton's kernels can run in this process; skips the test if nowhere.

    In CI Triton is installed with the `dev` extra: there, that it is missing is a failure.
    """
    if not find_spec("triton"):
        if "CI" in os.environ:
            pytest.fail("Triton is missing: is it still in the dev extra?")
        pytest.skip("Triton cannot be imported: install the dev or the gpu extra (Linux only)")
    import triton

    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("neither a CUDA device nor Triton's interpreter: TRITON_INTERPRET is not 1")
    return "cuda"


@pytest.fixture(params=["reference", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each implementation in turn."""
    if request.param == "triton":
        return Ops("triton", triton_device())
    return Ops("reference", "cpu")


@pytest.fixture
def triton_ops() -> Ops:
    """The kernels alone."""
    return Ops("triton", triton_device())
