"""How a request on a reuse schedule takes a step, and what it has from it for the next ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ray_cluster.engine.step.executor import Activations, Executor, RowReuse
from ray_cluster.engine.step.state import FullStep, RequestState


@dataclass(frozen=True, slots=True)
class _Entry:
    step_index: int
    activations: Activations

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for row in self.activations for parts in row for part in parts)


class ActivationStore:
    """Keeps the activations of each request's last full step, within a number of bytes.

    It is a cache: what is not here is computed again from the latents with which that step began,
    which a request carries with it. So neither its size nor who else is in it changes an image, and
    a request that goes to another replica takes nothing of it along.

    Args:
        budget_bytes: most that it holds; None for no limit. What was used longest ago goes first.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str, step_index: int) -> Activations | None:
        """Return what a request kept of that very step; None if that is not here."""
        entry = self._entries.get(request_id)
        if entry is None or entry.step_index != step_index:
            return None
        self._entries.move_to_end(request_id)
        return entry.activations

    def put(self, request_id: str, step_index: int, activations: Activations) -> None:
        """Keep what a request made in a step, in the place of what it kept before."""
        self.drop(request_id)
        entry = _Entry(step_index, activations)
        self._entries[request_id] = entry
        self._num_bytes += entry.num_bytes
        if self._budget_bytes is not None:
            while self._num_bytes > self._budget_bytes:
                self.drop(next(iter(self._entries)))

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is here."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes


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
    if state.reuse is None:
        return
    if state.reuse.num_outer not in (cuts := executor.num_outer):
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
