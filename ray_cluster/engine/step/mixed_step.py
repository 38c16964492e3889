"""One denoising step of requests of any sizes: the model call and the samplers' update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import (
    Composition,
    TokenLayout,
    composition_of,
    layout_of,
)
from ray_cluster.engine.controlnets.residuals import Arrived, NoResiduals, ResidualSource, StepPart
from ray_cluster.engine.device.streams import sent
from ray_cluster.engine.schedules.sampler_schedules import add_past
from ray_cluster.engine.step.executor import Executor, RowReuse, StepBatch
from ray_cluster.engine.step.reuse_steps import ActivationStore, Turn, turn_of
from ray_cluster.engine.step.step_call import Call, Held, SamplerInputs, Start, flat_pixels
from ray_cluster.errors import RequestFailed
from ray_cluster.kernels.sampler_update.op import sampler_update
from ray_cluster.policies.steps.batch_layout import BatchLayout

LayoutChoice = Callable[[int], BatchLayout]
"""Says for a number of sizes whether they share a model call."""


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


def compute_step(
    rows: Sequence[Held],
    executor: Executor[Any, Any],
    choose: LayoutChoice,
    sources: StepSources,
) -> list[Advanced | RequestFailed | None]:
    """Compute one step of rows in one batch; the rows' states stay as they are.

    None comes of a row whose residuals are late, and an error of one that will have none.

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
    prepare_rows(rows, executor)
    turns = [turn_of(row.state, row.table.num_calls, sources.store) for row in rows]
    lacking = [pair for pair in zip(rows, turns, strict=True) if pair[1].is_lacking]
    if lacking:
        _restore(lacking, executor, choose)
    call, order = call_of(rows, turns, executor)
    prediction, missing = _predict(call, choose, sources.residuals)
    found: dict[int, Advanced | RequestFailed | None] = {
        order[place]: error for place, error in missing.items()
    }
    left = [row for place, row in enumerate(order) if place not in missing]
    if left:
        update = SamplerInputs.of(call, missing)
        advanced = advance(update, executor.device, prediction, [turns[row] for row in left])
        found |= dict(zip(left, advanced, strict=True))
    return [found[index] for index in range(len(rows))]


def prepare_rows(rows: Sequence[Held], executor: Executor[Any, Any]) -> None:
    """Have the executor prepare the conditioning of rows that are new to it."""
    for row in rows:
        if row.prepared is None:
            row.prepared = executor.prepare(row.state.conditioning, row.deltas)


def call_of(
    rows: Sequence[Held], turns: Sequence[Turn], executor: Executor[Any, Any]
) -> tuple[Call, tuple[int, ...]]:
    """Return the model call of the next step of rows, and the order in which its layout has them.

    Args:
        turns: how each row takes its step.
    """
    composition, order = _arranged(rows)
    starts = [
        Start(rows[i], rows[i].state.latents, rows[i].state.step_index, turns[i].reuse)
        for i in order
    ]
    return Call(starts, layout_of(composition, executor.num_levels), executor), order


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
    conditionings = [row.state.conditioning for row in rows]
    return composition_of(
        [
            (*row.state.latents.shape[1:], own.is_guided)
            for row, own in zip(rows, conditionings, strict=True)
        ],
        [tuple(tuple(one.shape) for one in own.references) for own in conditionings],
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
        starts.append(Start(row, last.latents, last.step_index, again))
        parts.append(part)
    call = Call(starts, layout_of(composition, executor.num_levels), executor)
    _predict(call, choose, NoResiduals())
    for part, start in zip(parts, starts, strict=True):
        assert start.reuse is not None
        part.kept = start.reuse.fresh


def _predict(
    call: Call, choose: LayoutChoice, source: ResidualSource
) -> tuple[Tensor, dict[int, RequestFailed | None]]:
    """Call the model, once or for each size.

    Returns:
        The guided prediction ``[M, C]`` of the requests that have one, and by their place in the
        layout those that have none, with the reason if there is one.
    """
    composition, executor = call.batch.layout.composition, call.executor
    runs = [composition]
    if choose(len(composition)) == "grouped":
        runs = [(group,) for group in composition]
    parts = list(_parts(call, runs, executor.num_levels))
    missing: dict[int, RequestFailed | None] = {}
    pending = source.begin(parts)
    if pending is None:
        # one call after the other: what lies between its halves is needed for itself alone
        outputs = [executor.decode_half(executor.encode_half(part.batch)) for part in parts]
    else:
        halves = [executor.encode_half(part.batch) for part in parts]
        outputs, first = [], 0
        for index, (part, half) in enumerate(zip(parts, halves, strict=True)):
            arrived = pending.of(index)
            missing |= {first + one: arrived.failed.get(one) for one in arrived.missing}
            outputs += _decoded(executor, part, half, arrived)
            first += len(part.states)
    return torch.cat(outputs) if outputs else call.latents[:0], missing


def _decoded(
    executor: Executor[Any, Any], part: StepPart, half: Any, arrived: Arrived
) -> list[Tensor]:
    """Return the prediction of a call's requests whose residuals are there; none without any."""
    keeps = [request not in arrived.missing for request in range(len(part.states))]
    if not any(keeps):
        return []
    if not all(keeps):
        half = executor.cut(half, part.only(keeps).batch, keeps)
    return [executor.decode_half(half, arrived.residuals)]


def advance(
    update: SamplerInputs, device: torch.device, prediction: Tensor, turns: Sequence[Turn]
) -> list[Advanced]:
    """Return what the samplers make of rows' latents.

    Args:
        prediction: ``[M, C]``, after guidance; it may be changed.
    """
    rows, layout = update.rows, update.layout
    owner = layout.request_of_token(device)
    advanced, denoised = sampler_update(
        update.latents,
        prediction,
        flat_pixels([row.state.denoised for row in rows]),
        _noise(rows, device),
        update.coefficients,
        owner,
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
            _are_finite(advanced, owner, len(rows)),
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


def _parts(call: Call, runs: Sequence[Composition], num_levels: int) -> Iterator[StepPart]:
    """Cut a call's batch into one for each run of its sizes."""
    batch, states = call.batch, tuple(row.state for row in call.rows)
    num_calls = tuple(row.table.num_calls for row in call.rows)
    if len(runs) == 1:
        yield StepPart(batch, states, num_calls)
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
        yield StepPart(part, states[requests], num_calls[requests])
        request, token = requests.stop, tokens.stop


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
    return sent(flat_pixels(drawn), device)
