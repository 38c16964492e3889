"""One denoising step of requests of any sizes: the model call and the samplers' update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.deltas import LayerDeltas
from ray_cluster.engine.executor import Executor, RowReuse, StepBatch
from ray_cluster.engine.residuals import NoResiduals, ResidualSource, StepPart
from ray_cluster.engine.reuse_steps import ActivationStore, Turn, turn_of
from ray_cluster.engine.sampler_schedules import SamplerTable, add_past
from ray_cluster.engine.state import RequestState
from ray_cluster.engine.streams import sent
from ray_cluster.engine.token_layout import (
    Composition,
    TokenLayout,
    composition_of,
    layout_of,
)
from ray_cluster.kernels.sampler_update.op import sampler_update
from ray_cluster.kernels.sampler_update.reference import NUM_COEFFICIENTS
from ray_cluster.policies.batch_layout import BatchLayout

LayoutChoice = Callable[[int], BatchLayout]
"""Says for a number of sizes whether they share a model call."""


@dataclass(slots=True)
class Held:
    """A request that an engine has.

    Attributes:
        table: the schedule of its sampler.
        last_step: number of the engine's step that it was last part of, or after which it came.
        deltas: what it adds to the outputs of layers.
        prepared: what the executor made of its conditioning, from its first step here on.
    """

    state: RequestState
    table: SamplerTable
    last_step: int
    deltas: LayerDeltas | None = None
    prepared: Any = None

    @property
    def is_done(self) -> bool:
        """Whether it has taken its last step; a state imported like that is not to step."""
        return self.state.step_index >= self.table.num_calls

    @property
    def draws_noise(self) -> bool:
        """Whether its next step draws from the request's generator."""
        return self.table.takes_noise[self.state.step_index]


@dataclass(frozen=True, slots=True)
class StepSources:
    """Where a step has from what its model call does not compute.

    Attributes:
        store: of what rows keep of a step for later ones; without a limit unless given.
        residuals: of ControlNets; no request has any unless given.
    """

    store: ActivationStore = field(default_factory=ActivationStore)
    residuals: ResidualSource = field(default_factory=NoResiduals)


@dataclass(frozen=True, slots=True)
class Advanced:
    """What a step makes of one request, before it is its own.

    Attributes:
        latents: ``[C, h, w]``, the next latents.
        denoised: ``[C, h, w]``, the estimate of the clean ones.
        outputs: ``[k, C, h, w]``, what later steps of a multistep sampler need of the model's
            outputs, the newest first; None for other samplers.
        is_finite: whether all of the latents are.
        turn: how the step was taken.
    """

    latents: Tensor
    denoised: Tensor
    outputs: Tensor | None
    is_finite: bool
    turn: Turn


@dataclass(frozen=True, slots=True)
class _Start:
    """What one row's model call begins with.

    Attributes:
        latents: ``[C, h, w]`` in the sampler's own scale.
        step_index: of the step whose timestep it is.
        reuse: the row's part in reuse.
    """

    row: Held
    latents: Tensor
    step_index: int
    reuse: RowReuse | None


def compute_step(
    rows: Sequence[Held],
    executor: Executor[Any, Any],
    choose: LayoutChoice,
    sources: StepSources,
) -> list[Advanced]:
    """Compute one step of every row in one batch; the rows' states stay as they are.

    Generators of samplers that take noise are drawn from. What rows are to reuse, and what is not
    in the store, is computed again.

    Args:
        rows: any.
        executor: the model.
        choose: from the number of sizes, whether they share a model call.
        sources: of what the model call does not compute.

    Raises:
        ValueError: some rows have residuals, and some are on a schedule of reuse.
    """
    _check_residuals(rows, sources.residuals)
    for row in rows:
        if row.prepared is None:
            row.prepared = executor.prepare(row.state.conditioning, row.deltas)
    turns = [turn_of(row.state, row.table.num_calls, sources.store) for row in rows]
    lacking = [pair for pair in zip(rows, turns, strict=True) if pair[1].is_lacking]
    if lacking:
        _restore(lacking, executor, choose)
    composition, order = _arranged(rows)
    starts = [
        _Start(rows[i], rows[i].state.latents, rows[i].state.step_index, turns[i].reuse)
        for i in order
    ]
    call = _Call(starts, layout_of(composition, executor.num_levels), executor)
    prediction = _predict(call, choose, sources.residuals)
    advanced = _advance(call, prediction, [turns[i] for i in order])
    by_row = dict(zip(order, advanced, strict=True))
    return [by_row[index] for index in range(len(rows))]


def _check_residuals(rows: Sequence[Held], source: ResidualSource) -> None:
    """Refuse residuals beside reuse: what is reused was made without those of the present step."""
    added = [row.state for row in rows if source.adds_to(row.state)]
    reusing = [row.state for row in rows if row.state.reuse is not None]
    if added and reusing:
        raise ValueError(
            f"request {added[0].request.request_id!r} has ControlNet residuals and "
            f"{reusing[0].request.request_id!r} a reuse schedule: no model call has both; "
            "leave one of them out, or step these requests apart"
        )


def _arranged(rows: Sequence[Held]) -> tuple[Composition, tuple[int, ...]]:
    """Return the composition of rows, and the order in which its layout takes them."""
    return composition_of(
        [(*row.state.latents.shape[1:], row.state.conditioning.is_guided) for row in rows]
    )


def _restore(
    lacking: Sequence[tuple[Held, Turn]], executor: Executor[Any, Any], choose: LayoutChoice
) -> None:
    """Compute the last full step of rows again, for what they kept of it."""
    composition, order = _arranged([row for row, _ in lacking])
    starts, parts = [], []
    for row, turn in (lacking[index] for index in order):
        last, part = row.state.full_step, turn.reuse
        assert last is not None, "a row that reuses has had a full step"
        assert part is not None, "a row that lacks something reuses"
        again = RowReuse(part.num_outer)
        starts.append(_Start(row, last.latents, last.step_index, again))
        parts.append(part)
    call = _Call(starts, layout_of(composition, executor.num_levels), executor)
    _predict(call, choose, NoResiduals())
    for part, start in zip(parts, starts, strict=True):
        assert start.reuse is not None
        part.kept = start.reuse.fresh


class _Call:
    """The inputs of a model call over rows in the order of their layout.

    Attributes:
        rows: whose call it is.
        latents: ``[M, C]`` in the samplers' own scales.
        coefficients: ``[B, 8]`` of the samplers' updates.
        owner: ``[M]``, whose pixel it is.
        batch: what the executor takes.
    """

    def __init__(
        self, starts: Sequence[_Start], layout: TokenLayout, executor: Executor[Any, Any]
    ) -> None:
        packed = torch.stack([start.row.table.packed[start.step_index] for start in starts])
        scales = torch.tensor([[start.row.state.request.guidance_scale] for start in starts])
        timesteps, input_scale, self.coefficients, scales = sent(
            torch.cat([packed, scales], dim=1), executor.device
        ).split([1, 1, NUM_COEFFICIENTS, 1], dim=1)
        self.executor = executor
        self.rows = [start.row for start in starts]
        self.owner = layout.request_of_token(executor.device)
        self.latents = _flat([start.latents for start in starts])
        parts = tuple(start.reuse for start in starts)
        deltas = tuple(row.deltas for row in self.rows)
        inputs = self.latents * input_scale.index_select(0, self.owner)
        if executor.num_conditions:
            inputs = torch.cat([inputs, _conditions(starts, executor)], dim=1)
        self.batch: StepBatch[Any] = StepBatch(
            layout=layout,
            latents=inputs,
            timesteps=timesteps[:, 0],
            prepared=tuple(start.row.prepared for start in starts),
            guidance_scales=scales[:, 0],
            reuse=parts if any(part is not None for part in parts) else (),
            deltas=deltas if any(deltas) else (),
        )


def _predict(call: _Call, choose: LayoutChoice, source: ResidualSource) -> Tensor:
    """Call the model, once or for each size; return the guided prediction ``[M, C]``."""
    composition, executor = call.batch.layout.composition, call.executor
    runs = [composition]
    if choose(len(composition)) == "grouped":
        runs = [(group,) for group in composition]
    parts = list(_parts(call, runs, executor.num_levels))
    pending = source.begin(parts)
    if pending is None:
        # one call after the other: what lies between its halves is needed for itself alone
        outputs = [executor.decode_half(executor.encode_half(part.batch)) for part in parts]
    else:
        halves = [executor.encode_half(part.batch) for part in parts]
        outputs = [
            executor.decode_half(half, pending.of(index)) for index, half in enumerate(halves)
        ]
    return torch.cat(outputs)


def _advance(call: _Call, prediction: Tensor, turns: Sequence[Turn]) -> list[Advanced]:
    """Update the latents of a call's rows."""
    rows, layout = call.rows, call.batch.layout
    advanced, denoised = sampler_update(
        call.latents,
        prediction,
        _flat([row.state.denoised for row in rows]),
        _noise(rows, call.executor.device),
        call.coefficients,
        call.owner,
    )
    images = _images(advanced, rows, layout)
    # in place, so before anything is blended
    outputs = [
        add_past(row.table, row.state.step_index, new, output, row.state.outputs)
        for row, new, output in zip(rows, images, _images(prediction, rows, layout), strict=True)
    ]
    return [
        Advanced(*row)
        for row in zip(
            [_blended(row, new) for row, new in zip(rows, images, strict=True)],
            _images(denoised, rows, layout),
            outputs,
            _are_finite(advanced, call.owner, len(rows)),
            turns,
            strict=True,
        )
    ]


def _blended(row: Held, latents: Tensor) -> Tensor:
    """Return a row's next latents; in those of an edit, what its mask spares is the template's."""
    template = row.state.template
    if template is None or not template.is_blended:
        return latents
    return template.blended(latents, row.table.levels[row.state.step_index + 1])


def _parts(call: _Call, runs: Sequence[Composition], num_levels: int) -> Iterator[StepPart]:
    """Cut a call's batch into one for each run of its sizes."""
    batch, states = call.batch, tuple(row.state for row in call.rows)
    if len(runs) == 1:
        yield StepPart(batch, states)
        return
    request = token = 0
    for run in runs:
        layout = layout_of(run, num_levels)
        requests = slice(request, request + layout.num_requests)
        tokens = slice(token, token + sum(layout.request_tokens))
        part: StepBatch[Any] = StepBatch(
            layout=layout,
            latents=batch.latents[tokens],
            timesteps=batch.timesteps[requests],
            prepared=batch.prepared[requests],
            guidance_scales=batch.guidance_scales[requests],
            num_calls=len(runs),
            reuse=batch.reuse[requests],
            deltas=batch.deltas[requests],
        )
        yield StepPart(part, states[requests])
        request, token = requests.stop, tokens.stop


def _conditions(starts: Sequence[_Start], executor: Executor[Any, Any]) -> Tensor:
    """Return what an inpainting model sees beside latents, ``[M, K]``.

    Of a row without a template, as those that measure a model are, all is to be made: its mask is
    one everywhere, and what it spares is nothing.
    """
    images = []
    for start in starts:
        template = start.row.state.template
        if template is not None:
            assert template.conditions is not None, "its image was encoded for another model"
            images.append(template.conditions)
            continue
        blank = start.latents.new_zeros(executor.num_conditions, *start.latents.shape[1:])
        blank[0] = 1.0
        images.append(blank)
    return _flat(images)


def _flat(images: Sequence[Tensor]) -> Tensor:
    """Return images ``[C, h, w]`` as rows of pixels ``[M, C]``."""
    return torch.cat([image.permute(1, 2, 0).flatten(0, 1) for image in images])


def _images(flat: Tensor, rows: Sequence[Held], layout: TokenLayout) -> list[Tensor]:
    """Return rows of pixels as images ``[C, h, w]``, views."""
    parts = flat.split(layout.request_tokens)
    return [
        part.unflatten(0, row.state.latents.shape[1:]).permute(2, 0, 1)
        for part, row in zip(parts, rows, strict=True)
    ]


def _are_finite(flat: Tensor, owner: Tensor, count: int) -> list[bool]:
    bad = (~torch.isfinite(flat)).any(dim=1).float()
    num_bad = torch.zeros(count, device=flat.device).index_add_(0, owner, bad)
    return [number == 0 for number in num_bad.tolist()]


def _noise(rows: Sequence[Held], device: torch.device) -> Tensor | None:
    """Draw each row's noise from its own generator, as the request alone would draw it."""
    if not any(row.draws_noise for row in rows):
        return None
    drawn = [
        torch.randn((1, *row.state.latents.shape), generator=row.state.generator)[0]
        if row.draws_noise
        else torch.zeros(row.state.latents.shape)
        for row in rows
    ]
    # the model call of the same step is still running
    return sent(_flat(drawn), device)
