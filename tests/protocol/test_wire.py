"""All that processes say to each other passes the codec: every type, every field, twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ray_cluster.protocol.calling.interface import Method, methods_of
from ray_cluster.protocol.controller import ControlCalls, PlanCalls
from ray_cluster.protocol.dispatcher import (
    CellCalls,
    DispatcherClient,
    DispatcherLink,
    ImageCalls,
    JobCalls,
    LoraCalls,
)
from tests.codec.made import leaves, made

METHODS = {
    f"{interface.__name__}.{name}": method
    for interface in (DispatcherClient, DispatcherLink, ControlCalls)
    for name, method in methods_of(interface).items()
}


def test_a_gateway_calls_images_jobs_loras_the_cell_and_its_plan() -> None:
    parts = [methods_of(one) for one in (ImageCalls, JobCalls, CellCalls, LoraCalls, PlanCalls)]
    assert set(methods_of(DispatcherClient)) == set().union(*parts)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_arguments_and_results_come_back_whole(method: Method) -> None:
    rng = random.Random(method.name)
    for codec in (method.arguments, method.result):
        for _ in range(5):
            value: Any = made(codec.kind, rng)
            data = codec.encode(value)
            found = codec.decode(data)
            assert list(leaves(found)) == list(leaves(value))
            assert codec.encode(found) == data
