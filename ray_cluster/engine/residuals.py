"""Where the residuals of ControlNets come from: nowhere, this process, or remote services.

A source is given a step's model calls before any of them begins, so that a service works while the
first halves run, and hands out what it has for each call between the halves (SwiftDiffusion,
section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class LocalResiduals:
    """Computes residuals in this process, when a call's first half is done.

    Args:
        compute: from a part to its residuals; None if no row has any.
        adds_to: whether a request has some.
    """

    def __init__(
        self,
        compute: Callable[[StepPart], Residuals | None],
        adds_to: Callable[[RequestState], bool],
    ) -> None:
        self._compute, self._adds_to = compute, adds_to

    def adds_to(self, state: RequestState) -> bool:
        """Return what the given function says."""
        return self._adds_to(state)

    def begin(self, parts: Sequence[StepPart]) -> PendingResiduals | None:
        """Take the parts, to compute them later."""
        if not any(self._adds_to(state) for part in parts for state in part.states):
            return None
        return _LocalPending(parts, self._compute)


@dataclass(frozen=True, slots=True)
class _LocalPending:
    parts: Sequence[StepPart]
    compute: Callable[[StepPart], Residuals | None]

    def of(self, index: int) -> Residuals | None:
        return self.compute(self.parts[index])
