"""How a request on a reuse schedule takes a step, and what it has from it for the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_cluster.engine.activations import ActivationStore
from ray_cluster.engine.executor import Executor, RowReuse
from ray_cluster.engine.state import FullStep, RequestState


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of a request.

    Attributes:
        is_full: whether the model is computed whole.
        reuse: its part in reuse; None if it takes nothing and keeps nothing.
    """

    is_full: bool = True
    reuse: RowReuse | None = None

    @property
    def is_lacking(self) -> bool:
        """Whether what it is to take over is not here."""
        return not self.is_full and self.reuse is not None and self.reuse.kept is None


def check_reuse(state: RequestState, executor: Executor[Any, Any]) -> None:
    """Refuse a schedule that a model cannot run.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    cuts = executor.num_outer
    if state.reuse is not None and state.reuse.num_outer not in cuts:
        raise ValueError(
            f"request {state.request.request_id!r}: num_outer of its reuse schedule is "
            f"{state.reuse.num_outer}; allowed with this model: {cuts.start} to {cuts.stop - 1}"
        )


def turn_of(state: RequestState, num_steps: int, store: ActivationStore) -> Turn:
    """Return how a request takes its next step; its own progress decides.

    Args:
        num_steps: of its whole run, as its sampler counts them.
    """
    schedule, last = state.reuse, state.full_step
    if schedule is None:
        return Turn()
    if last is None or schedule.is_full(state.step_index, last.step_index):
        is_kept = schedule.is_kept(state.step_index, num_steps)
        return Turn(reuse=RowReuse(schedule.num_outer) if is_kept else None)
    kept = store.get(state.request.request_id, last.step_index)
    return Turn(is_full=False, reuse=RowReuse(schedule.num_outer, kept=kept))


def note_step(state: RequestState, turn: Turn, store: ActivationStore) -> None:
    """Note that a request's step has succeeded, before its state becomes the next one."""
    if state.reuse is None:
        return
    if turn.is_full:
        state.full_step = FullStep(state.step_index, state.latents)
    else:
        state.num_reused += 1
    kept = None if turn.reuse is None else turn.reuse.fresh or turn.reuse.kept
    if kept is not None and state.full_step is not None:
        store.put(state.request.request_id, state.full_step.step_index, kept)
