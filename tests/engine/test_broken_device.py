"""An accelerator that is lost to the process ends the engine; other errors of it cost one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_cluster.engine.device.device_errors import is_out_of_memory, raise_if_broken
from ray_cluster.errors import DeviceBroken
from tests.engine.conftest import Zoo
from tests.engine.failing import (
    BAD,
    STAGES,
    FailsWith,
    check_peers,
    raises_for,
    requests_with_a_bad_one,
)
from tests.engine.harness import drive, engine_of, request, start_all
from tests.engine.staged import Running, StagedModel, StageName, until

STICKY = (
    torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("HIP error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED: CUDA_ERROR_ILLEGAL_ADDRESS"),
    RuntimeError("CUDA driver error: misaligned address"),
)
NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
)
OF_ONE_CALL = (
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    RuntimeError("Triton cannot run geglu: OutOfResources: out of resource: shared memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: only says so"),
)


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_what_every_later_call_would_raise_too_is_a_broken_device(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(DeviceBroken, match="lost to this process") as broken:
        raise_if_broken(error)
    assert str(error) in str(broken.value)


@pytest.mark.parametrize("error", [*NO_MEMORY, *OF_ONE_CALL], ids=repr)
def test_what_a_later_call_may_survive_is_not(error: Exception) -> None:
    raise_if_broken(error)
    assert is_out_of_memory(error) == (error in NO_MEMORY)


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_no_words_tell_the_device_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    def answer() -> None:
        if is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    error = RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
    if is_lost:
        with pytest.raises(DeviceBroken, match=r"illegal memory access.*EXECUTION_FAILED"):
            raise_if_broken(error)
    raise_if_broken(ValueError("of a request"))
    if not is_lost:
        raise_if_broken(error)


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_a_step_on_a_broken_device_is_not_tried_again(zoo: Zoo, error: Exception) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    executor = FailsWith(model.executor, error, states[2].conditioning, [])
    with pytest.raises(DeviceBroken):
        drive(engine_of(model, executor=executor), {0: states})
    assert executor.sizes == [4]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_device_ends_the_runner_and_blames_no_request(
    model: StagedModel, stage: StageName
) -> None:
    model.before.append(raises_for(stage, BAD, STICKY[0]))
    with Running(model.loaded) as running:
        running.submit(*requests_with_a_bad_one())
        until(lambda: running.events.deaths, "the runner's death")
        (death,) = running.events.deaths
        assert death.thread == stage
        assert isinstance(death.error, DeviceBroken)
        assert "device-side assert" in str(death)
        until(lambda: not is_alive(running))
        assert BAD not in running.events.ended_ids
        assert all(not hasattr(end, "error") for end in running.events.ends)


@pytest.mark.parametrize("error", OF_ONE_CALL, ids=repr)
def test_a_device_error_of_one_call_fails_its_request_alone(
    model: StagedModel, pixels: dict[str, Any], error: Exception
) -> None:
    model.before.append(raises_for("denoise", BAD, error))
    with Running(model.loaded) as running:
        running.submit(*requests_with_a_bad_one())
        assert str(error) in running.events.failure_of(BAD).message
        check_peers(running, pixels)
        assert is_alive(running)


def is_alive(running: Running) -> bool:
    try:
        running.runner.check_alive(60.0)
    except RuntimeError:
        return False
    return True
