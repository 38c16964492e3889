"""The step engine: continuous batching at the granularity of one denoising step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ray_cluster.engine.device_errors import is_out_of_memory, raise_if_broken
from ray_cluster.engine.executor import Executor, StepBatch
from ray_cluster.engine.sampler_schedules import SamplerTable
from ray_cluster.engine.samplers import SamplerTables
from ray_cluster.engine.state import RequestState
from ray_cluster.errors import MODEL_ERRORS, RequestFailed
from ray_cluster.kernels.sampler_update.reference import NUM_COEFFICIENTS, sampler_update
from ray_cluster.policies.cost_model import StepWork, work_of
from ray_cluster.policies.types import BatchDecision, RowView

logger = logging.getLogger(__name__)

_NO_WORK = StepWork(0.0, 0.0, 0)

SizePx = tuple[int, int]
BatchPolicy = Callable[[Sequence[RowView], float], BatchDecision]
"""Chooses the next batch among the rows, at an instant on the engine's clock."""


class BatchLimits(Protocol):
    """Learns from the batches that ran how large a batch may be."""

    def lower(self, size: SizePx, batch: int) -> None:
        """Note that a larger batch ran out of memory, and that one of this many rows did not."""

    def confirm(self, size: SizePx, batch: int) -> None:
        """Note that a batch of this many rows ran."""


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
        finished: states that took their last step; the engine no longer holds them.
        failed: rows that failed; the engine no longer holds these either.
        previews: of those that took a step after which their request wants one.
        duration_s: seconds the step took.
        work: what the model computed.
    """

    stepped: tuple[str, ...] = ()
    finished: tuple[RequestState, ...] = ()
    failed: tuple[FailedRow, ...] = ()
    previews: tuple[PreviewLatents, ...] = ()
    duration_s: float = 0.0
    work: StepWork = _NO_WORK


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
        limits: told of every batch that ran, and of those that ran out of memory.
    """

    def __init__(
        self,
        executor: Executor[Any],
        policy: BatchPolicy,
        tables: SamplerTables,
        clock: Callable[[], float],
        *,
        limits: BatchLimits | None = None,
    ) -> None:
        self._executor = executor
        self._policy = policy
        self._tables = tables
        self._clock = clock
        self._limits = limits
        self._rows: dict[str, RequestState] = {}
        self._last_step_by_id: dict[str, int] = {}
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps_done_by_id(self) -> dict[str, int]:
        """Progress of every row held."""
        return {request_id: row.step_index for request_id, row in self._rows.items()}

    def add(self, row: RequestState) -> None:
        """Take an encoded request; it joins a batch at a following step."""
        request_id = row.request.request_id
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is already in the engine")
        self._rows[request_id] = row
        self._last_step_by_id[request_id] = self._num_steps

    def import_state(self, state: RequestState) -> None:
        """Take a request that another engine has exported, and go on where it stopped."""
        self.add(state)

    def export_state(self, request_id: str) -> RequestState:
        """Give a request away at this step boundary; KeyError if it is not here."""
        self._last_step_by_id.pop(request_id)
        return self._rows.pop(request_id)

    def copy_state(self, request_id: str) -> RequestState:
        """Return a copy of a row at this step boundary; the row goes on. KeyError if not here."""
        return self._rows[request_id].copy()

    def holds(self, state: RequestState) -> bool:
        """Whether this very state is one of the rows."""
        return self._rows.get(state.request.request_id) is state

    def abort(self, request_id: str) -> bool:
        """Drop a request; its row is gone before the next step. Returns whether it was here."""
        self._last_step_by_id.pop(request_id, None)
        return self._rows.pop(request_id, None) is not None

    def step(self) -> StepReport:
        """Take one decision and one denoising step of the rows it chose."""
        started_s = self._clock()
        views = self._views()
        decision = self._policy(views, started_s)
        rows = [self._rows[request_id] for request_id in decision.request_ids]
        if not rows:
            return StepReport()
        self._num_steps += 1
        for row in rows:
            self._last_step_by_id[row.request.request_id] = self._num_steps
        chosen = set(decision.request_ids)
        failed = self._advance(rows)
        finished = [row for row in rows if self.is_done(row)]
        for row in (*finished, *(failure.state for failure in failed)):
            self.abort(row.request.request_id)
        return StepReport(
            stepped=tuple(decision.request_ids),
            finished=tuple(finished),
            failed=tuple(failed),
            previews=tuple(
                PreviewLatents(row, row.denoised, row.step_index)
                for row in rows
                if row.is_preview_due and self.holds(row)
            ),
            duration_s=self._clock() - started_s,
            work=work_of(view.request for view in views if view.request.request_id in chosen),
        )

    def _views(self) -> list[RowView]:
        return [
            RowView(
                request=row.request.view(
                    arrival_s=row.arrival_s, deadline_s=row.deadline_s, steps_done=row.step_index
                ),
                waited_rounds=self._num_steps - self._last_step_by_id[request_id],
            )
            for request_id, row in self._rows.items()
        ]

    def is_done(self, row: RequestState) -> bool:
        """Whether the row has taken its last step; a state imported like that is not to step."""
        table = self._tables.table(row.request.sampler, row.request.num_steps)
        return row.step_index >= table.num_steps

    def _advance(self, rows: Sequence[RequestState]) -> list[FailedRow]:
        """Step the rows together; if that fails, in halves, so that only the culprit fails.

        Raises:
            DeviceBroken: no later step can succeed in this process.
        """
        tables = [self._tables.table(r.request.sampler, r.request.num_steps) for r in rows]
        generators = [
            row.generator
            for row, table in zip(rows, tables, strict=True)
            if table.takes_noise[row.step_index]
        ]
        generator_states = [generator.get_state() for generator in generators]
        size = (rows[0].request.width_px, rows[0].request.height_px)
        try:
            advanced, denoised = self._compute(rows, tables)
            failed = _commit(rows, advanced, denoised)
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            message = f"{type(error).__name__}: {error}"
            is_memory = is_out_of_memory(error)
        else:
            if self._limits is not None:
                self._limits.confirm(size, len(rows))
            return failed
        # only out of the except block is the memory free that the traceback held
        for generator, generator_state in zip(generators, generator_states, strict=True):
            generator.set_state(generator_state)
        if len(rows) == 1:
            return [FailedRow(rows[0], RequestFailed(message, "denoise"))]
        logger.warning("step of %d rows failed (%s); trying halves", len(rows), message)
        larger = -(-len(rows) // 2)
        failed = [*self._advance(rows[:larger]), *self._advance(rows[larger:])]
        if is_memory and not failed and self._limits is not None:
            self._limits.lower(size, larger)
        return failed

    def _compute(
        self, rows: Sequence[RequestState], tables: Sequence[SamplerTable]
    ) -> tuple[Tensor, Tensor]:
        packed = [table.packed[row.step_index] for table, row in zip(tables, rows, strict=True)]
        timesteps, input_scale, coefficients = (
            torch.stack(packed).to(self._executor.device).split([1, 1, NUM_COEFFICIENTS], dim=1)
        )
        latents = torch.stack([row.latents for row in rows])
        batch = StepBatch(
            latents=latents * input_scale[:, :, None, None],
            timesteps=timesteps[:, 0],
            conditionings=tuple(row.conditioning for row in rows),
            guidance_scales=tuple(row.request.guidance_scale for row in rows),
        )
        output = self._executor.decode_half(self._executor.encode_half(batch))
        return sampler_update(
            latents,
            output,
            torch.stack([row.denoised for row in rows]),
            _noise(rows, tables),
            coefficients,
        )


def _commit(rows: Sequence[RequestState], advanced: Tensor, denoised: Tensor) -> list[FailedRow]:
    """Make a computed step the rows' own; those that became NaN or infinite have failed."""
    failed = []
    finite = torch.isfinite(advanced.flatten(1)).all(dim=1).tolist()
    for row, latents, estimate, is_finite in zip(rows, advanced, denoised, finite, strict=True):
        if is_finite:
            row.latents, row.denoised = latents, estimate
            row.step_index += 1
        else:
            message = f"latents became NaN or infinite at step {row.step_index + 1}"
            failed.append(FailedRow(row, RequestFailed(message, "denoise")))
    return failed


def _noise(rows: Sequence[RequestState], tables: Sequence[SamplerTable]) -> Tensor | None:
    """Draw each row's noise from its own generator, as the request alone would draw it."""
    draws = [table.takes_noise[row.step_index] for row, table in zip(rows, tables, strict=True)]
    if not any(draws):
        return None
    noise = torch.zeros((len(rows), *rows[0].latents.shape))
    for index, row in enumerate(rows):
        if draws[index]:
            noise[index] = torch.randn((1, *row.latents.shape), generator=row.generator)[0]
    return noise.to(rows[0].latents.device)
