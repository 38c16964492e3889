"""Requests that come and go, some of which reuse, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.mixed_step import StepSources
from ray_cluster.engine.step.reuse_steps import ActivationStore
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.requests import ImageRequest, SamplerName
from tests.engine.harness import (
    RUN_TOLERANCE,
    EngineRun,
    all_rows,
    difference,
    drive,
    request,
    start,
    taken,
)


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that joins before a step and may be aborted some steps later."""

    one: ImageRequest
    reuse: ReuseSchedule | None
    joins: int = 0
    stays: int | None = None


@st.composite
def visits(
    draw: st.DrawFn,
    sizes_px: Sequence[tuple[int, int]],
    *,
    samplers: Sequence[SamplerName] = ("ddim",),
    reuses: st.SearchStrategy[ReuseSchedule | None] | None = None,
) -> list[Visit]:
    """Draw visits of a few kinds: most requests have been made alone before."""
    found = []
    for index in range(draw(st.integers(1, 9))):
        width, height = draw(st.sampled_from(sizes_px))
        kind = draw(st.integers(0, 3))
        one = request(
            f"v{index}",
            width_px=width,
            height_px=height,
            sampler=draw(st.sampled_from(samplers)),
            guidance_scale=(1.0, 1.0, 3.0, 5.5)[kind],
            num_steps=draw(st.integers(1, 5)),
            seed=kind,
            prompt=("red", "a large blue square")[kind % 2],
        )
        reuse = None if reuses is None else draw(reuses)
        stays = draw(st.one_of(st.none(), st.integers(1, 4)))
        found.append(Visit(one, reuse, draw(st.integers(0, 5)), stays))
    return found


class Company:
    """An engine over one model, and what the model makes of requests that are alone."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.alone = cache(self._alone)

    def state(self, visit: Visit) -> RequestState:
        one = replace(visit.one, sampler=self.model.profile.default_sampler)
        return start(self.model, one, reuse=visit.reuse)

    def moved(self, state: RequestState) -> RequestState:
        """What arrives of a state in another replica."""
        data = state.to_bytes()
        return RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)

    def engine(
        self, store: ActivationStore | None = None, executor: Any = None, layout: Any = None
    ) -> StepEngine:
        return StepEngine(
            executor or self.model.executor,
            all_rows,
            self.model.tables,
            lambda: 0.0,
            layout=layout and (lambda _sizes: layout),
            sources=None if store is None else StepSources(store),
        )

    def run(
        self, visits: Sequence[Visit], store: ActivationStore | None = None, layout: Any = None
    ) -> EngineRun:
        joining: dict[int, list[RequestState]] = {0: []}
        leaving: dict[int, list[str]] = {}
        for visit in visits:
            joining.setdefault(visit.joins, []).append(self.state(visit))
            if visit.stays is not None:
                leaving.setdefault(visit.joins + visit.stays, []).append(visit.one.request_id)
        return drive(self.engine(store, layout=layout), joining, leaving)

    def check_all(self, visits: Sequence[Visit], budget_bytes: int | None, layout: Any) -> None:
        """Assert that every row comes to what it comes to alone, and leaves nothing behind."""
        store = ActivationStore(budget_bytes)
        run = self.run(visits, store, layout)
        assert not run.failed
        for visit in visits:
            if visit.stays is None or visit.stays > visit.one.num_steps:
                assert self.gap(visit, run.latents(visit.one.request_id)) <= RUN_TOLERANCE
        assert (len(store), store.num_bytes) == (0, 0)

    def run_moving(self, visit: Visit, num_steps: int) -> RequestState:
        """A request's last state, when it moved to another engine after so many steps."""
        engine = self.engine()
        engine.add(self.state(visit))
        with torch.inference_mode():
            for _ in range(num_steps):
                engine.step()
        state = self.moved(taken(engine, visit.one.request_id))
        return drive(self.engine(), {0: [state]}).finished[visit.one.request_id]

    def _alone(self, one: ImageRequest, reuse: ReuseSchedule | None) -> Tensor:
        return self.run([Visit(one, reuse)]).latents(one.request_id)

    def gap(self, visit: Visit, latents: Tensor) -> float:
        """How far a row's latents are from those of the same request alone."""
        return difference(latents, self.alone(replace(visit.one, request_id="alone"), visit.reuse))
