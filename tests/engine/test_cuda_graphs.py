"""A graph replays the same work on the same memory; without a GPU, that is what is tested.

The recorder below stands in for the device: it writes down every operator of a call with the
tensors that it read and wrote, and runs them again on these very tensors. What Python decided
while the call was recorded is not decided again, as in a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ray_cluster.engine.device.cuda_graphs import GraphCapture, GraphedExecutor
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.errors import ConfigError
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.engine.conftest import Zoo
from tests.engine.dits import dit_request
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    all_rows,
    call_model,
    difference,
    drive,
    engine_of,
    request,
    start_all,
)
from tests.engine.reusing import Company, Visit

# they wait for the device, or bring something from the host: a capture fails at them
NOT_IN_A_GRAPH = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal")
SIZES_PX = ((64, 64), (96, 96), (64, 64), (64, 128))
FAMILIES = ("sd", "sdxl", "sd3", "flux")


class Recorder(TorchDispatchMode):
    """Writes down what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        """Compute it again, into the same memory."""
        for func, args, kwargs, before in self.calls:
            read = {memory_of(one) for one in tensors_of((args, kwargs))}
            found = func(*args, **kwargs)
            for goal, source in zip(tensors_of(before), tensors_of(found), strict=True):
                # what is a view of an input, or the input itself, is there already
                if memory_of(goal) not in read:
                    goal.copy_(source)


def tensors_of(tree: Any) -> list[Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, Tensor)]


def memory_of(tensor: Tensor) -> int:
    # weights in oneDNN's own order have no address; nothing writes to them
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    with Recorder() as recorder:
        output = run()
    names = {func.name().partition("::")[2].partition(".")[0] for func, *_ in recorder.calls}
    assert not names & set(NOT_IN_A_GRAPH), names & set(NOT_IN_A_GRAPH)
    return output, recorder.replay


def requests_of(family: str, seed: int = 0) -> list[Any]:
    make = request if family == "sd" else dit_request
    return [
        make(
            f"r{index}",
            width_px=width,
            height_px=height,
            seed=seed + index,
            prompt="red circle " * (1 + index + seed),
            guidance_scale=(1.0, 3.0)[index % 2],
        )
        for index, (width, height) in enumerate(SIZES_PX)
    ]


def call(model: LoadedModel, executor: Any, seed: int) -> list[Tensor]:
    """One model call; another seed has other latents, timesteps, prompts and scales."""
    states = start_all(model, requests_of(family_of(model), seed))
    generator = torch.Generator().manual_seed(seed)
    return call_model(
        executor,
        [torch.randn(state.latents.shape, generator=generator) for state in states],
        torch.linspace(1 + 40 * seed, 900, len(states)).round(),
        [state.conditioning for state in states],
        [1.0, 3.0 + seed, 1.0, 5.0],
    )


def family_of(model: LoadedModel) -> str:
    kinds = {"stable-diffusion-3": "sd3", "flux": "flux"}
    return kinds.get(model.profile.family, "sd")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_is_the_call_itself_whatever_the_inputs(zoo: Zoo, family: str) -> None:
    model = zoo.model(family)
    graphed = GraphedExecutor(model.executor, capture=record)
    for seed in (0, 1, 2):
        expected, found = call(model, model.executor, seed), call(model, graphed, seed)
        gaps = [difference(*pair) for pair in zip(found, expected, strict=True)]
        assert max(gaps) <= CALL_TOLERANCE
    assert graphed.num_graphs == 1
    # negative control: what a graph would give that does not take new inputs in
    stale = [difference(*pair) for pair in zip(call(model, graphed, 0), found, strict=True)]
    assert max(stale) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_results_stay_when_the_graph_runs_again(zoo: Zoo) -> None:
    model = zoo.model("sd")
    graphed = GraphedExecutor(model.executor, capture=record)
    first = call(model, graphed, 0)
    kept = [one.clone() for one in first]
    call(model, graphed, 1)
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))


@pytest.mark.parametrize("layout", ["mixed", "grouped"])
def test_an_engine_runs_on_graphs(zoo: Zoo, layout: str) -> None:
    model = zoo.model("sd")
    graphed = GraphedExecutor(model.executor, capture=record)
    plain = drive(engine_of(model), {0: start_all(model, requests_of("sd"))})
    tables, choose = model.tables, lambda _sizes: layout
    engine = StepEngine(graphed, all_rows, tables, time.monotonic, layout=choose)
    run = drive(engine, {0: start_all(model, requests_of("sd"))})
    assert not run.failed
    assert graphed.num_graphs == (1 if layout == "mixed" else 3)
    for request_id in plain.finished:
        assert difference(run.latents(request_id), plain.latents(request_id)) <= 1e-4


def test_the_least_recently_used_graph_is_dropped(zoo: Zoo) -> None:
    model, captured = zoo.model("sd"), []

    def count(run: Callable[[], Tensor]) -> Any:
        captured.append(1)
        return record(run)

    graphed = GraphedExecutor(model.executor, max_graphs=2, capture=count)
    states = start_all(model, requests_of("sd"))

    def alone(index: int) -> None:
        state = states[index]
        times, owned = torch.tensor([5.0]), [state.conditioning]
        call_model(graphed, [state.latents], times, owned, [2.0])

    for index in (0, 1, 0, 3, 0, 1):
        alone(index)
    # 1 was dropped for 3, and 3 for 1
    assert len(captured) == 4
    assert graphed.num_graphs == 2
    graphed.clear()
    assert graphed.num_graphs == 0


def test_what_cannot_be_captured_runs_without_a_graph(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    model, tried = zoo.model("sd"), []

    def fails(run: Callable[[], Tensor]) -> Any:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphed = GraphedExecutor(model.executor, capture=fails)
    for seed in (0, 1):
        expected, found = call(model, model.executor, seed), call(model, graphed, seed)
        assert max(difference(*pair) for pair in zip(found, expected, strict=True)) == 0
    assert (len(tried), graphed.num_graphs) == (1, 0)
    assert caplog.text.count("no CUDA graph of") == 1


def test_rows_that_reuse_run_without_a_graph(small: Company) -> None:
    """What they keep is made anew in every step; a graph's own would be overwritten."""
    graphed = GraphedExecutor(small.model.executor, capture=record)
    assert graphed.num_outer == small.model.executor.num_outer
    assert graphed.patch_multiple == small.model.executor.patch_multiple
    visit = Visit(request(num_steps=5), ReuseSchedule.parse("outer1-every2"))
    run = drive(small.engine(executor=graphed), {0: [small.state(visit)]})
    assert small.gap(visit, run.latents("a")) <= RUN_TOLERANCE


def test_graphs_without_a_gpu_are_refused(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        GraphedExecutor(zoo.model("sd").executor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_function_runs_again_on_new_inputs() -> None:
    x = torch.randn(8, 8, device="cuda")
    x @ x
    output, replay = GraphCapture()(lambda: x @ x)
    x.copy_(torch.randn(8, 8, device="cuda"))
    replay()
    assert torch.equal(output, x @ x)
