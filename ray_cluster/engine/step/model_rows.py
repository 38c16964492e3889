"""From requests to the rows of a model call and back: one row each, with guidance two."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas, RowDeltas
from ray_cluster.engine.step.executor import PreparedT, StepBatch
from ray_cluster.engine.step.rings import Ring

# of rings further in, what is kept for each model call
_INNER_RINGS = 2
# of the same rows, until their deltas are stacked whatever that takes: about as long as it saves
_STEPS_BEFORE = 3

StackedT = TypeVar("StackedT")


def rows_of(negative: Tensor | None, positive: Tensor) -> list[Tensor]:
    """Return what a request's model rows are made of, the unconditional one first."""
    return [positive] if negative is None else [negative, positive]


def lay_out(batch: StepBatch[Any], dtype: torch.dtype) -> Tensor:
    """Return the latents of all model rows, ``[N, C]``."""
    layout, latents = batch.layout, batch.latents.to(dtype)
    if layout.num_guided == 0:
        return latents
    images = latents.split(layout.request_tokens)
    return torch.cat([images[request] for request in layout.row_request])


def guide(output: Tensor, batch: StepBatch[Any]) -> Tensor:
    """Combine each request's two model rows; the one of a request without guidance stays.

    Args:
        output: ``[N, C]`` float32, of all model rows.
    """
    layout = batch.layout
    if layout.num_guided == 0:
        return output
    conditional = output.index_select(0, layout.conditional_tokens(output.device))
    unconditional = output.index_select(0, layout.unconditional_tokens(output.device))
    owner = layout.request_of_token(output.device)
    scales = batch.guidance_scales.index_select(0, owner)[:, None]
    return torch.addcmul(unconditional, scales, conditional - unconditional)


def request_deltas(batch: StepBatch[Any]) -> RowDeltas | None:
    """Return which requests of a batch have deltas."""
    return RowDeltas.of(batch.deltas)


def prepared_deltas(deltas: LayerDeltas | None, num_rows: int) -> RowDeltas | None:
    """Return those of a request's own model rows."""
    return RowDeltas.of([deltas] * num_rows)


class KeptStacks(Generic[PreparedT, StackedT]):
    """What the requests of the latest step were prepared to, stacked: the next is mostly the same.

    Args:
        stack: makes it from pairs of what a request was prepared to and which of its rows is meant.
    """

    def __init__(self, stack: Callable[[Sequence[tuple[PreparedT, int]]], StackedT]) -> None:
        self._stack = stack
        # the requests' own are kept with them, so that no other object takes their place
        self._kept: OrderedDict[tuple[int, ...], tuple[object, StackedT]] = OrderedDict()

    def of(self, batch: StepBatch[PreparedT], ring: Ring) -> StackedT:
        """Return the stack of those model rows of a batch that are in a ring."""
        prepared = tuple(batch.prepared[request] for request in ring.requests)
        key = tuple(map(id, prepared))
        if key not in self._kept:
            layout = ring.layout
            rows = zip(layout.row_request, layout.is_conditional, strict=True)
            chosen = [(prepared[request], -1 if last else 0) for request, last in rows]
            stacked = self._stack(chosen)
            self._kept[key] = (prepared, stacked)
            # a step in which rows reuse is between steps in which they do not
            most = batch.num_calls * (1 + _INNER_RINGS * bool(batch.reuse))
            while len(self._kept) > most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]


class KeptDeltas:
    """The deltas of the latest steps' rows: the next step mostly has the same ones."""

    def __init__(self) -> None:
        # the owners are kept with them, so that no other object has their ids
        self._kept: OrderedDict[tuple[int, ...], tuple[object, RowDeltas | None]] = OrderedDict()
        self._num_steps: Counter[tuple[int, ...]] = Counter()

    def begin(self, batch: StepBatch[Any]) -> None:
        """Begin a step: rows that were the same in several are likely to be so again."""
        if not batch.deltas:
            self._kept.clear()
        self._num_steps = Counter({key: self._num_steps[key] + 1 for key in self._kept})

    def of(self, batch: StepBatch[Any], ring: Ring) -> RowDeltas | None:
        """Return which model rows of a ring have deltas."""
        if not batch.deltas:
            return None
        requests = batch.layout.row_request
        owners = [batch.deltas[requests[image]] for image in ring.images]
        key = tuple(map(id, owners))
        if key not in self._kept:
            self._kept[key] = (owners, RowDeltas.of(owners))
            most = batch.num_calls * (1 + _INNER_RINGS * bool(batch.reuse))
            while len(self._kept) > most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        found = self._kept[key][1]
        if found is not None and self._num_steps[key] >= _STEPS_BEFORE:
            found.expect_more_steps()
        return found
