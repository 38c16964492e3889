"""Where the residuals of ControlNets come from.

A source is given a step's model calls before any of them begins, so that a service works while the
first halves run, and hands out what it has for each call between the halves (SwiftDiffusion,
section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ray_cluster.engine.step.executor import Residuals, StepBatch
from ray_cluster.engine.step.rings import part_of
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class StepPart:
    """One model call of a step.

    Attributes:
        batch: what the executor takes: the requests' latents, scaled for the model, and timesteps.
        states: the requests, in the order of the batch's layout; not to be changed.
        num_calls: model calls that each of them takes in all.
    """

    batch: StepBatch[Any]
    states: tuple[RequestState, ...]
    num_calls: tuple[int, ...]

    def only(self, keeps: Sequence[bool]) -> StepPart:
        """Return the call of some of its requests."""
        batch = self.batch
        kept = [request for request, is_kept in enumerate(keeps) if is_kept]
        latents = batch.latents.split(batch.layout.request_tokens)
        return StepPart(
            StepBatch(
                layout=part_of(batch.layout, tuple(keeps)).layout,
                latents=torch.cat([latents[request] for request in kept]),
                timesteps=batch.timesteps[kept],
                prepared=tuple(batch.prepared[request] for request in kept),
                guidance_scales=batch.guidance_scales[kept],
                num_calls=batch.num_calls,
                # there are none where there are residuals
                reuse=(),
                deltas=tuple(batch.deltas[request] for request in kept if batch.deltas),
            ),
            tuple(self.states[request] for request in kept),
            tuple(self.num_calls[request] for request in kept),
        )


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a source has for a model call.

    Attributes:
        late: requests of the call, by their index, whose residuals are not there yet.
        failed: those that will have none, with the reason.
        residuals: of all others; None where none of them has any.
    """

    late: frozenset[int] = frozenset()
    failed: Mapping[int, RequestFailed] = field(default_factory=dict)
    residuals: Residuals | None = None

    @property
    def missing(self) -> frozenset[int]:
        """Requests that cannot take this step now."""
        return self.late | self.failed.keys()


class PendingResiduals(Protocol):
    """What was asked for at the beginning of a step."""

    def of(self, index: int, /) -> Arrived:
        """Return what is there for a part; waits for it, but not for long."""


class ResidualSource(Protocol):
    """Makes what is added between the halves of the model calls of a step."""

    def adds_to(self, state: RequestState, /) -> bool:
        """Whether a request has residuals, in whatever step; such a request may not reuse."""

    def is_ready(self, state: RequestState, /) -> bool:
        """Whether a request may be in a step now; not while it waits for what was late."""

    def begin(self, parts: Sequence[StepPart], /) -> PendingResiduals | None:
        """Take the model calls of a step, before the first of them; None if none has residuals."""

    def took_step(self, state: RequestState, /) -> None:
        """Note that a request has taken its step: what was asked for it has served."""

    def drop(self, state: RequestState, /) -> None:
        """Forget a request that has left the engine."""


class NoResiduals:
    """The source of an engine without ControlNets."""

    def adds_to(self, _state: RequestState) -> bool:
        """Return no."""
        return False

    def is_ready(self, _state: RequestState) -> bool:
        """Return yes."""
        return True

    def begin(self, _parts: Sequence[StepPart]) -> None:
        """Return nothing: the halves of a call need not be apart."""

    def took_step(self, _state: RequestState) -> None:
        """Do nothing."""

    def drop(self, _state: RequestState) -> None:
        """Do nothing."""
