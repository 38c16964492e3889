"""Residuals that are computed in this process, between the halves of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_cluster.engine.controlnets.residuals import Arrived, PendingResiduals, StepPart
from ray_cluster.engine.step.executor import Residuals
from ray_cluster.engine.step.state import RequestState


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

    def is_ready(self, _state: RequestState) -> bool:
        """Return yes."""
        return True

    def took_step(self, _state: RequestState) -> None:
        """Do nothing."""

    def drop(self, _state: RequestState) -> None:
        """Do nothing."""

    def begin(self, parts: Sequence[StepPart]) -> PendingResiduals | None:
        """Take the parts, to compute them later."""
        if not any(self._adds_to(state) for part in parts for state in part.states):
            return None
        return _LocalPending(parts, self._compute)


@dataclass(frozen=True, slots=True)
class _LocalPending:
    parts: Sequence[StepPart]
    compute: Callable[[StepPart], Residuals | None]

    def of(self, index: int) -> Arrived:
        return Arrived(residuals=self.compute(self.parts[index]))
