"""Requests in two calls of a model, of which the second one reuses what the first one made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.step.executor import Activations, RowReuse, StepBatch
from ray_cluster.policies.steps.reuse import ActivePatches

SCALE = 2.0


@dataclass(slots=True)
class StepRow:
    """A request in two steps of a model.

    Attributes:
        cut: blocks at either end around what it reuses; None for an exact row.
        latents: ``[C, h, w]`` of each step.
        more: per skip connection and for the middle, ``[rows, tokens, C]`` of each step.
        kept: of the first step.
        active: what the second one computes within the cut.
        deltas: what the request adds to layers.
    """

    prepared: Any
    is_guided: bool
    cut: int | None
    latents: list[Tensor]
    more: list[list[Tensor]] = field(default_factory=list)
    kept: Activations | None = None
    active: ActivePatches | None = None
    deltas: LayerDeltas | None = None


def timestep_of(step: int) -> float:
    return 500.0 - 100 * step


def batch_of(executor: Any, rows: Sequence[StepRow], step: int) -> StepBatch[Any]:
    """The batch of a step; the first one is full."""
    sizes = [(*row.latents[step].shape[1:], row.is_guided) for row in rows]
    composition, order = composition_of(sizes)
    assert order == tuple(range(len(rows))), "the rows are given in their layout's order"
    parts = tuple(_part(row, step) for row in rows)
    return StepBatch(
        layout_of(composition, executor.num_levels),
        torch.cat([row.latents[step].permute(1, 2, 0).flatten(0, 1) for row in rows]),
        torch.full((len(rows),), timestep_of(step)),
        tuple(row.prepared for row in rows),
        torch.full((len(rows),), SCALE),
        reuse=parts if any(part is not None for part in parts) else (),
        deltas=tuple(row.deltas for row in rows) if any(row.deltas for row in rows) else (),
    )


def _part(row: StepRow, step: int) -> RowReuse | None:
    if row.cut is None:
        return None
    by_patch = row.active is not None
    return RowReuse(row.cut, row.kept, is_by_patch=by_patch, active=row.active if step else None)


def call(company: Any, rows: Sequence[StepRow], step: int) -> list[Tensor]:
    """What a company's model predicts for each row in a step."""
    executor = company.model.executor
    return predict_batch(executor, rows, batch_of(executor, rows, step))


def predict_batch(
    executor: Any, rows: Sequence[StepRow], batch: StepBatch[Any], residuals: Any = None
) -> list[Tensor]:
    """What is predicted for each row of a batch; what it keeps is noted."""
    with torch.inference_mode():
        output = executor.decode_half(executor.encode_half(batch), residuals)
    # an exact batch has none
    for row, part in zip(rows, batch.reuse, strict=bool(batch.reuse)):
        if part is not None and part.fresh is not None:
            row.kept = part.fresh
    return list(output.split(batch.layout.request_tokens))
