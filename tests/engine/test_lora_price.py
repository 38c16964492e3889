"""What LoRAs cost is measured when a replica starts, on a clock that counts what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.stages.warmup import measure_step_cost
from ray_cluster.errors import ModelUnsupported
from ray_cluster.policies.costs.cost_model import ExtraWork, StepWork, step_s
from ray_cluster.policies.types import StepCost
from tests.engine.conftest import Zoo


class Computed(TorchDispatchMode):
    """A clock that goes on with every number that this thread computes."""

    now_s = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.now_s += sum(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor)) / 1e9
        return made


def measured(zoo: Zoo, name: str) -> StepCost:
    with Computed() as clock:
        return measure_step_cost(zoo.model(name), max_batch=3, clock=lambda: clock.now_s)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
def test_a_lora_costs_a_share_of_the_rows_that_have_it(zoo: Zoo, name: str) -> None:
    assert 0.005 < measured(zoo, name).lora_share < 2.0


def test_of_a_model_that_cannot_have_any_the_share_is_zero(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = type(zoo.model("sd").executor)

    def refuse(*_: object) -> None:
        raise ModelUnsupported("no deltas here")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "bind", refuse)
        assert measured(zoo, "sd").lora_share == 0
    with monkeypatch.context() as patched:
        patched.setattr(executor, "layers", {"conv_in": nn.Conv2d(1, 1, 1)})
        assert measured(zoo, "sd").lora_share == 0
    assert measured(zoo, "sd").lora_share > 0


def test_steps_with_loras_do_not_make_rows_without_seem_dear() -> None:
    real = StepCost(0.02, 1.0, lora_share=0.5)
    costs = StepCosts(real)
    works = [
        StepWork(0.1 * count, 0.0, extra=ExtraWork(lora_megapixels=0.1 * num_loras))
        for count in range(1, 5)
        for num_loras in range(count, count + 2)
    ]
    for number in range(200):
        work = works[number % len(works)]
        costs.observe(work, step_s(real, work))
    alone = StepWork(0.2, 0.0)
    assert step_s(costs.current, alone) == pytest.approx(step_s(real, alone), rel=0.01)
    # one that leaves LoRAs out of the work takes the rows for dearer than they are
    blind = StepCosts(real)
    for number in range(200):
        work = works[number % len(works)]
        blind.observe(replace(work, extra=None), step_s(real, work))
    assert step_s(blind.current, alone) > 1.1 * step_s(real, alone)
