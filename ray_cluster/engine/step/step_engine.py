"""The step engine: continuous batching at the granularity of one denoising step.

Requests of any size, timestep, sampler and prompt share a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.weight_switch import WeightSwitch
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.device.device_errors import is_out_of_memory, raise_if_broken
from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.step.executor import Executor
from ray_cluster.engine.step.mixed_step import Advanced, LayoutChoice, StepSources, compute_step
from ray_cluster.engine.step.reuse_steps import check_reuse, note_step
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_call import Held, LateLoras
from ray_cluster.errors import MODEL_ERRORS, RequestFailed
from ray_cluster.policies.costs.cost_model import StepWork, work_of
from ray_cluster.policies.steps.batch_layout import BatchLayout, choose_layout
from ray_cluster.policies.types import RequestView, RowView, StepCost

logger = logging.getLogger(__name__)

_NO_WORK = StepWork(0.0, 0.0, 0)

SizePx = tuple[int, int]
BatchPolicy = Callable[[Sequence[RowView], float], Sequence[str]]
"""Chooses the requests of the next batch, at an instant on the engine's clock."""


class BatchLimits(Protocol):
    """Limits of batches, adjusted by the batches that ran."""

    def lower(self, sizes: Sequence[SizePx]) -> None:
        """Note that a larger batch ran out of memory, and that one of these images did not."""

    def confirm(self, sizes: Sequence[SizePx]) -> None:
        """Note that a batch of these images ran."""


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row whose step raised even when it was tried alone."""

    state: RequestState
    error: RequestFailed


@dataclass(frozen=True, slots=True)
class PreviewLatents:
    """What a row that goes on would become by its present estimate.

    Attributes:
        latents: the estimate of the denoised latents, ``[C, h, w]``.
        steps_done: the steps it rests on.
    """

    state: RequestState
    latents: Tensor
    steps_done: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one denoising step did.

    Attributes:
        stepped: request ids that took a step.
        late: request ids that were to take one, and whose residuals are late.
        finished: states that took their last step; the engine no longer holds them.
        failed: rows that failed; the engine no longer holds these either.
        previews: of those that took a step after which their request wants one.
        duration_s: seconds the step took.
        work: what the model computes if nothing is reused.
        num_reused: of those that took a step, how many took over what a former one had computed.
    """

    stepped: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    finished: tuple[RequestState, ...] = ()
    failed: tuple[FailedRow, ...] = ()
    previews: tuple[PreviewLatents, ...] = ()
    duration_s: float = 0.0
    work: StepWork = _NO_WORK
    num_reused: int = 0


class StepEngine:
    """Owns the rows in flight on one set of ranks and advances them one step at a time.

    It knows nothing of prompts, images, threads or other replicas. Not thread-safe: one thread
    calls everything. A row's state changes only after its step has succeeded, so an error in a
    batch costs the other rows nothing but a repeated model call.

    Args:
        executor: the model.
        policy: chooses the rows of the next batch.
        tables: sampler schedules of the model.
        clock: monotonic seconds.
        limits: receives every batch that ran, and those that ran out of memory.
        costs: receives how long every step took.
        layout: whether the sizes of a batch share a model call; by their costs unless given.
        sources: of what a step's model call does not compute; no residuals unless given.

    Attributes:
        weights: what the model computes with.
    """

    def __init__(
        self,
        executor: Executor[Any, Any],
        policy: BatchPolicy,
        tables: SamplerTables,
        clock: Callable[[], float],
        *,
        limits: BatchLimits | None = None,
        costs: StepCosts | None = None,
        layout: LayoutChoice | None = None,
        sources: StepSources | None = None,
    ) -> None:
        self._executor = executor
        self._policy = policy
        self._tables = tables
        self._clock = clock
        self._limits = limits
        self._costs = costs or StepCosts(clock=clock)
        self._choose_layout = layout or self._by_cost
        self._sources = sources or StepSources()
        self._rows: dict[str, Held] = {}
        self.weights = WeightSwitch(self._rows)
        self._num_steps = 0
        # tries to compute one, those of halves among them
        self._num_computed = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def can_step(self) -> bool:
        """Whether any row can take a step now."""
        return any(map(self._is_ready, self._rows.values()))

    @property
    def is_waiting(self) -> bool:
        """Whether there are rows, and none of them can take a step now."""
        return bool(self._rows) and not self.can_step

    @property
    def step_cost(self) -> StepCost:
        """What a step costs at present."""
        return self._costs.current

    @property
    def steps_done_by_id(self) -> dict[str, int]:
        """Progress of every row held."""
        return {request_id: row.state.step_index for request_id, row in self._rows.items()}

    def add(self, row: RequestState, deltas: LayerDeltas | None = None) -> None:
        """Take an encoded request, new or from another engine; it joins a batch at a later step.

        If the model computes with the merged weights of other deltas, it gets its own back.

        Args:
            deltas: what it adds to the outputs of layers, bound to the executor; not those of LoRAs
                that it lacks in its first steps, see :meth:`add_loras`.

        Raises:
            ValueError: a request of that id is here, or the model cannot keep its schedule, or it
                has such a schedule and residuals, or ControlNets and no maps of theirs.
        """
        request_id = row.request.request_id
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is already in the engine")
        check_reuse(row, self._executor)
        if row.reuse is not None and self._sources.residuals.adds_to(row):
            raise ValueError(
                f"request {request_id!r} has a reuse schedule and ControlNet residuals; leave one "
                "of them out"
            )
        num_controls = len(row.request.add_ons.controls)
        if len(row.maps) != num_controls:
            raise ValueError(
                f"request {request_id!r} has {num_controls} ControlNets and {len(row.maps)} maps"
            )
        if num_controls and not self._sources.residuals.adds_to(row):
            raise ValueError(f"request {request_id!r} has ControlNets, and this engine takes none")
        held = Held(row, self._table(row), self._num_steps, deltas)
        held.is_merged = self.weights.admit(deltas)
        self._rows[request_id] = held

    @property
    def rows(self) -> Mapping[str, Held]:
        """The rows held, by request id; not to be changed."""
        return self._rows

    def add_loras(self, state: RequestState, loras: LateLoras) -> None:
        """Give a row what it is to have after its first steps; one that is not here is left out."""
        if self.holds(state):
            self._rows[state.request.request_id].late = loras

    def copy_state(self, request_id: str) -> RequestState:
        """Return a copy of a row at this step boundary; the row goes on. KeyError if not here."""
        return self._rows[request_id].state.copy()

    def holds(self, state: RequestState) -> bool:
        """Whether this very state is one of the rows."""
        row = self._rows.get(state.request.request_id)
        return row is not None and row.state is state

    def abort(self, request_id: str) -> bool:
        """Drop a request; its row is gone before the next step. Returns whether it was here."""
        self._sources.store.drop(request_id)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._sources.residuals.drop(row.state)
        return row is not None

    def step(self) -> StepReport:
        """Take one decision and one denoising step of the rows it chose."""
        started_s, computed_before_s = self._clock(), self._costs.busy_s()
        views = self._views()
        chosen = self._policy(views, started_s)
        rows = [self._rows[request_id] for request_id in chosen]
        if not rows:
            return StepReport()
        self._num_steps += 1
        for row in rows:
            row.last_step = self._num_steps
            row.begin_step()
        reused_before = sum(row.state.num_reused for row in rows)
        computed_before = self._num_computed
        indices = [row.state.step_index for row in rows]
        work = work_of(
            self._as_computed(view.request) for view in views if view.request.request_id in chosen
        )
        failed = [row for group in self._apart(rows) for row in self._advance(group)]
        lost = {row.state.request.request_id for row in failed}
        late = [
            row.state.request.request_id
            for row, before in zip(rows, indices, strict=True)
            if row.state.step_index == before and row.state.request.request_id not in lost
        ]
        finished = [row.state for row in rows if row.is_done]
        for state in (*finished, *(failure.state for failure in failed)):
            self.abort(state.request.request_id)
        num_reused = sum(row.state.num_reused for row in rows) - reused_before
        duration_s = self._clock() - started_s
        # costs are those of whole steps, and of such as memory sufficed for
        if not (failed or late or num_reused) and self._num_computed == computed_before + 1:
            layout = self._choose_layout(work.num_sizes)
            num_calls = work.num_sizes if layout == "grouped" else 1
            busy_s = self._costs.busy_s() - computed_before_s
            self._costs.observe(work, duration_s, num_calls=num_calls, busy_s=busy_s)
        return StepReport(
            stepped=tuple(one for one in chosen if one not in late),
            late=tuple(late),
            finished=tuple(finished),
            failed=tuple(failed),
            previews=tuple(
                PreviewLatents(state, state.estimate, state.step_index)
                for state in (row.state for row in rows)
                if state.is_preview_due and self.holds(state)
            ),
            duration_s=duration_s,
            work=work,
            num_reused=num_reused,
        )

    def _views(self) -> list[RowView]:
        return [
            RowView(
                request=row.state.request.view(
                    arrival_s=row.state.arrival_s,
                    deadline_s=row.state.deadline_s,
                    steps_done=min(row.state.step_index, row.state.request.num_steps - 1),
                ),
                waited_rounds=self._num_steps - row.last_step,
            )
            for row in self._rows.values()
            if self._is_ready(row)
        ]

    def _as_computed(self, view: RequestView) -> RequestView:
        """Return a request as its next step is computed here: nothing reused, some ControlNets."""
        if view.step_share == 1 and not view.controls:
            return view
        controls = self._rows[view.request_id].active_controlnets
        return replace(view, step_share=1.0, controls=controls)

    def _is_ready(self, row: Held) -> bool:
        return row.is_ready and self._sources.residuals.is_ready(row.state)

    def is_done(self, state: RequestState) -> bool:
        """Whether the request has taken its last step; such a state is not to be added."""
        return state.step_index >= self._table(state).num_calls

    def _by_cost(self, num_sizes: int) -> BatchLayout:
        return choose_layout(num_sizes, self._costs.current, step=self._num_steps)

    def _table(self, state: RequestState) -> SamplerTable:
        return self._tables.of(state.request)

    def _apart(self, rows: Sequence[Held]) -> list[list[Held]]:
        """Group rows for model calls: rows with residuals never share one with rows that reuse."""
        added = [row for row in rows if self._sources.residuals.adds_to(row.state)]
        reusing = [row for row in rows if row.state.reuse is not None]
        if not (added and reusing):
            return [list(rows)]
        return [reusing, [row for row in rows if row.state.reuse is None]]

    def _advance(self, rows: Sequence[Held]) -> list[FailedRow]:
        """Step the rows together; if that fails, in halves, so that only the culprit fails.

        Raises:
            DeviceBroken: no later step can succeed in this process.
        """
        generators = [row.state.generator for row in rows if row.draws_noise]
        generator_states = [generator.get_state() for generator in generators]
        try:
            self._num_computed += 1
            advanced = compute_step(rows, self._executor, self._choose_layout, self._sources)
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            message = f"{type(error).__name__}: {error}"
            is_memory = is_out_of_memory(error)
        else:
            if self._limits is not None:
                self._limits.confirm([row.state.request.size_px for row in rows])
            return self._commit(rows, advanced)
        # only out of the except block is the memory free that the traceback held
        for generator, generator_state in zip(generators, generator_states, strict=True):
            generator.set_state(generator_state)
        if len(rows) == 1:
            return [FailedRow(rows[0].state, RequestFailed(message, "denoise"))]
        logger.warning("step of %d rows failed (%s); trying halves", len(rows), message)
        larger = -(-len(rows) // 2)
        failed = [*self._advance(rows[:larger]), *self._advance(rows[larger:])]
        if is_memory and not failed and self._limits is not None:
            self._limits.lower([row.state.request.size_px for row in rows[:larger]])
        return failed

    def _commit(
        self, rows: Sequence[Held], advanced: Sequence[Advanced | RequestFailed | None]
    ) -> list[FailedRow]:
        """Make a computed step the rows' own; those that became NaN or infinite have failed.

        One row's failure is its own, for the others may have gone on already. Those that are late
        stay as they are.
        """
        failed = []
        for row, new in zip(rows, advanced, strict=True):
            state = row.state
            if new is None:
                continue
            if isinstance(new, RequestFailed):
                failed.append(FailedRow(state, new))
                continue
            try:
                if not new.is_finite:
                    raise ArithmeticError("latents became NaN or infinite")
                note_step(state, new.turn, self._sources.store)
            except MODEL_ERRORS as error:
                raise_if_broken(error)
                message = f"{type(error).__name__}: {error} at step {state.step_index + 1}"
                failed.append(FailedRow(state, RequestFailed(message, "denoise")))
            else:
                state.latents, state.denoised = new.latents, new.denoised
                state.outputs = new.outputs
                state.step_index += 1
                self._sources.residuals.took_step(state)
        return failed
