"""Where the residuals of ControlNets come from.

A source is given a step's model calls before any of them begins, so that a service works while the
first halves run, and hands out what it has for each call between the halves (SwiftDiffusion,
section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray_cluster.engine.executor import Residuals, StepBatch
from ray_cluster.engine.state import RequestState


@dataclass(frozen=True, slots=True)
class StepPart:
    """One model call of a step.

    Attributes:
        batch: what the executor takes: the requests' latents, scaled for the model, and timesteps.
        states: the requests, in the order of the batch's layout; not to be changed.
    """

    batch: StepBatch[Any]
    states: tuple[RequestState, ...]


class PendingResiduals(Protocol):
    """What was asked for at the beginning of a step."""

    def of(self, index: int, /) -> Residuals | None:
        """Return the residuals of a part; None where no row has any. Waits for them if need be."""


class ResidualSource(Protocol):
    """Makes what is added between the halves of the model calls of a step."""

    def adds_to(self, state: RequestState, /) -> bool:
        """Whether a request has residuals, in whatever step; such a request may not reuse."""

    def begin(self, parts: Sequence[StepPart], /) -> PendingResiduals | None:
        """Take the model calls of a step, before the first of them; None if none has residuals."""


class NoResiduals:
    """The source of an engine without ControlNets."""

    def adds_to(self, _state: RequestState) -> bool:
        """Return no."""
        return False

    def begin(self, _parts: Sequence[StepPart]) -> None:
        """Return nothing: the halves of a call need not be apart."""
