"""What a pool's configuration makes of an engine."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_cluster.engine.stages.building import build_runner, uses_graphs
from ray_cluster.engine.stages.events import Stepped
from tests.engine.conftest import Zoo
from tests.engine.harness import pool, request
from tests.engine.staged import Events, StagedModel, until

# of two sizes, together from the first step on if they may be
REQUESTS = [
    request(f"r{number}", width_px=side, height_px=64, num_steps=4)
    for number, side in enumerate((64, 64, 128, 128))
]


@pytest.mark.parametrize(
    ("changes", "sizes_of_a_step", "calls_of_a_step"),
    [
        ({}, 2, 1),
        ({"layout": "mixed"}, 2, 1),
        ({"layout": "grouped"}, 2, 2),
        ({"batches": "one-size"}, 1, 1),
    ],
)
def test_sizes_share_a_step_or_a_model_call_as_configured(
    zoo: Zoo, changes: dict[str, Any], sizes_of_a_step: int, calls_of_a_step: int
) -> None:
    model = StagedModel(zoo.model("sd"))
    steps: list[Any] = []
    events = Events()

    def note(event: Any) -> None:
        if isinstance(event, Stepped):
            num_calls = sum(stage == "denoise" for stage, _ in model.calls)
            steps.append((event.report.work.num_sizes, num_calls))
        events(event)

    runner = build_runner(model.loaded, pool("unused", **changes), clock=time.monotonic)
    # all are there before the first step
    for one in REQUESTS:
        runner.submit(one, deadline_s=time.monotonic() + 60)
    runner.start(note)
    until(lambda: len(events.ends) == len(REQUESTS), "all images")
    runner.stop()
    assert max(sizes for sizes, _ in steps) == sizes_of_a_step
    counts = [0, *(calls for _, calls in steps)]
    most = max(
        after - before
        for before, after, (sizes, _) in zip(counts, counts[1:], steps, strict=False)
        if sizes == sizes_of_a_step
    )
    assert most == calls_of_a_step


def test_a_batch_is_as_large_as_allowed_now_and_never_larger_than_planned(zoo: Zoo) -> None:
    model = StagedModel(zoo.model("sd"))
    sizes: list[int] = []
    events = Events()

    def note(event: Any) -> None:
        if isinstance(event, Stepped):
            sizes.append(len(event.report.stepped))
        events(event)

    runner = build_runner(model.loaded, pool("unused", max_batch=3), clock=time.monotonic)
    runner.start(note)

    def largest(allowed: int, name: str) -> int:
        sizes.clear()
        ends = len(events.ends)
        assert runner.set_max_batch(allowed) == min(allowed, 3)
        for number in range(4):
            one = request(f"{name}{number}", num_steps=6)
            runner.submit(one, deadline_s=time.monotonic() + 60)
        until(lambda: len(events.ends) == ends + 4, "all images")
        return max(sizes)

    assert largest(1, "a") == 1
    assert largest(64, "b") in {2, 3}
    assert largest(2, "c") == 2
    runner.stop()


@pytest.mark.parametrize(
    ("device", "verdict", "wanted", "expected"),
    [
        ("cuda", "fits", "auto", True),
        ("cuda", "capped", "auto", True),
        ("cuda", "offload", "auto", False),
        ("cuda", "fits", "off", False),
        ("cpu", "fits", "auto", False),
    ],
)
def test_graphs_are_used_where_weights_stay_on_a_gpu(
    zoo: Zoo, device: str, verdict: Any, wanted: str, expected: bool
) -> None:
    model = zoo.model("sd")
    executor: Any = SimpleNamespace(device=torch.device(device))
    model = replace(model, executor=executor, memory=replace(model.memory, verdict=verdict))
    assert uses_graphs(pool("shapes-sd", cuda_graphs=wanted), model) is expected
