"""Ranks whose steps take virtual time, and are computed by one real executor of this process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.groups.degree_costs import DegreeCosts, Way
from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.engine.groups.group_executor import GroupExecutor, GroupModel
from ray_cluster.engine.groups.ranks import RankDeltas, RankStep, StepEnd
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.step.step_engine import StepReport
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.types import DegreeCost, GroupCost, StepCost
from tests.engine.harness import call_model

DEGREES = (1, 2, 4)
# of a step of a megapixel: twice the ranks take 0.6 of the time
COSTS = {degree: StepCost(0.001, 0.6 ** DEGREES.index(degree)) for degree in DEGREES}


class VirtualRanks:
    """See :class:`ray_cluster.engine.groups.ranks.Ranks`.

    Attributes:
        now_s: the time.
        begun: all steps, with when they began.
    """

    def __init__(self, model: LoadedModel, num_ranks: int = 4) -> None:
        self.num_ranks = num_ranks
        self.now_s = 0.0
        self.is_up = True
        self.begun: list[tuple[float, RankStep]] = []
        self._model = model
        self._keys = itertools.count()
        self.kept: dict[int, tuple[Conditioning, LayerDeltas | None]] = {}
        self.running: dict[int, tuple[float, float, RankStep, Tensor]] = {}
        self._ends: list[StepEnd] = []
        self._is_back = False
        self._bound: dict[int, LayerDeltas] = {}

    @property
    def has_news(self) -> bool:
        return bool(self._ends) or self._is_back

    def keep(self, conditioning: Conditioning, deltas: LayerDeltas | None) -> int:
        own = self._bound[deltas.number] if isinstance(deltas, RankDeltas) else None
        self.kept[key := next(self._keys)] = (conditioning, own)
        return key

    def forget(self, key: int) -> None:
        self.kept.pop(key, None)

    def bind(self, deltas: Mapping[str, Delta]) -> RankDeltas:
        number = len(self._bound)
        self._bound[number] = self._model.executor.bind(deltas)
        return RankDeltas(number, len(deltas))

    def begin(self, step: RankStep) -> None:
        busy = {rank for _, _, one, _ in self.running.values() for rank in one.ranks}
        assert busy.isdisjoint(step.ranks), "a rank takes one step at a time"
        assert step.ranks.start % len(step.ranks) == 0
        assert step.ranks.stop <= self.num_ranks
        self.begun.append((self.now_s, step))
        height, width = step.latent_hw
        pixels = height * width * self._factor**2 / 1e6
        cost = COSTS[len(step.ranks)]
        conditioning, _ = self.kept[step.key]
        rows = 2 if conditioning.is_guided else 1
        end_s = self.now_s + cost.fixed_s + rows * pixels * cost.per_megapixel_s
        # a request may be forgotten while its step goes on
        self.running[step.call] = (end_s, self.now_s, step, self._predicted(step))

    @property
    def _factor(self) -> int:
        return 64 // self._model.executor.latent_shape(64, 64)[1]

    def ends(self) -> Sequence[StepEnd]:
        found, self._ends = self._ends, []
        self._is_back = False
        return found

    def pass_time(self) -> None:
        """Let the next step end."""
        call, (self.now_s, began_s, _, prediction) = min(
            self.running.items(), key=lambda one: one[1][0]
        )
        del self.running[call]
        self._ends.append(StepEnd(call, self.now_s - began_s, prediction))

    def lose(self, first: int = 0) -> None:
        """Lose all ranks, one of them first, with the steps that they are at."""
        self._ends += [
            StepEnd(call, 0.0, None, first in step.ranks)
            for call, (_, _, step, _) in self.running.items()
        ]
        self.running.clear()
        self.is_up = False

    def come_back(self) -> None:
        self.is_up = self._is_back = True

    def _predicted(self, step: RankStep) -> Tensor:
        conditioning, deltas = self.kept[step.key]
        latents = step.latents.unflatten(0, step.latent_hw).permute(2, 0, 1)
        (found,) = call_model(
            self._model.executor,
            [latents],
            torch.tensor([step.timestep]),
            [conditioning],
            [step.guidance_scale],
            [deltas] if deltas else [],
        )
        return found.permute(1, 2, 0).flatten(0, 1)


def group_of(model: LoadedModel, **options: Any) -> tuple[GroupEngine, VirtualRanks]:
    """Return an engine over virtual ranks, whose clock is theirs."""
    ranks = VirtualRanks(model)
    executor: Any = model.executor
    facts = GroupModel(
        torch.float32,
        executor.latent_shape(64, 64)[0],
        executor.patch_multiple,
        64 // executor.latent_shape(64, 64)[1],
    )
    costs = DegreeCosts(
        [Way(degree) for degree in DEGREES],
        GroupCost(ranks.num_ranks, (DegreeCost(1, COSTS[1]),), 8),
    )
    costs.begin({Way(degree): cost for degree, cost in COSTS.items()}, 0.0)
    engine = GroupEngine(
        GroupExecutor(facts, ranks),
        model.tables,
        lambda: ranks.now_s,
        costs=costs,
        planner=partial(plan_round, options=RoundOptions("large", drops=False, **options)),
    )
    return engine, ranks


def run(engine: GroupEngine, ranks: VirtualRanks) -> list[StepReport]:
    """Step until nothing is left; return what was reported."""
    reports = []
    while len(engine) or ranks.running:
        with torch.inference_mode():
            if engine.can_step:
                reports.append(engine.step())
            assert not len(engine) or ranks.running, "the group goes on"
            if ranks.running:
                ranks.pass_time()
    return reports
