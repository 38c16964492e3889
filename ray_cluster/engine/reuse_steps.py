"""How a request on a reuse schedule takes a step, and what it has from it for the next ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ray_cluster.engine.activations import ActivationStore
from ray_cluster.engine.executor import Executor, RowReuse
from ray_cluster.engine.state import FullStep, RequestState
from ray_cluster.policies.reuse import ReuseProgress


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
    """Refuse a schedule that a model cannot keep.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    reuse = state.reuse
    if reuse is None:
        return
    cuts, multiple = executor.num_outer, executor.patch_multiple
    given, allowed = "", ""
    if reuse.num_outer not in cuts:
        given, allowed = "num_outer", f"{cuts.start} to {cuts.stop - 1}"
    elif reuse.is_by_patch and reuse.patch_size % multiple:
        given, allowed = "patch_size", f"multiples of {multiple}"
    if given:
        raise ValueError(
            f"request {state.request.request_id!r}: {given} of its reuse schedule is "
            f"{getattr(reuse, given)}; allowed with this model: {allowed}"
        )


def turn_of(state: RequestState, num_steps: int, store: ActivationStore) -> Turn:
    """Return how a request takes its next step; its own progress decides.

    Args:
        num_steps: of its whole run, as its sampler counts them.
    """
    schedule, last = state.reuse, state.full_step
    if schedule is None:
        return Turn()
    progress = ReuseProgress(
        step_index=state.step_index,
        num_steps=num_steps,
        last_full=None if last is None else last.step_index,
        drift=0.0 if last is None else last.drift,
    )
    if last is None or schedule.is_full(progress):
        part = RowReuse(schedule.num_outer, is_by_patch=schedule.is_by_patch)
        return Turn(reuse=part if schedule.is_kept(progress) else None)
    part = RowReuse(
        schedule.num_outer,
        kept=store.get(state.request.request_id, last.step_index),
        is_by_patch=schedule.is_by_patch,
        active=last.active,
    )
    return Turn(is_full=False, reuse=part)


def note_step(state: RequestState, denoised: Tensor, turn: Turn, store: ActivationStore) -> None:
    """Take in that a request's step has succeeded, before its state becomes the next one.

    Args:
        denoised: what the step estimates the clean latents to be.
        turn: how it was taken.
    """
    if state.reuse is None:
        return
    kept = None if turn.reuse is None else turn.reuse.fresh or turn.reuse.kept
    drift = 0.0 if state.reuse.max_drift is None else _change(state.denoised, denoised)
    if turn.is_full:
        active = None
        if state.reuse.is_by_patch:
            moved = _moved(state.denoised, denoised, state.reuse.patch_size)
            active = state.reuse.most_moved(moved)
        state.full_step = FullStep(state.step_index, state.latents, drift, active)
    elif state.full_step is not None:
        state.full_step = replace(state.full_step, drift=state.full_step.drift + drift)
        state.num_reused += 1
    if kept is not None and state.full_step is not None:
        store.put(state.request.request_id, state.full_step.step_index, kept)


def _change(old: Tensor, new: Tensor) -> float:
    """Return by how much an estimate has moved; infinity from zeros, before the first."""
    return float((new - old).abs().mean() / old.abs().mean())


def _moved(old: Tensor, new: Tensor, patch_size: int) -> list[float]:
    """Return the mean by which an estimate ``[C, h, w]`` has moved in every patch, row by row."""
    change = (new - old).abs().mean(0, keepdim=True)
    # a patch at the border that has fewer pixels is their mean
    patches: list[float] = F.avg_pool2d(change, patch_size, ceil_mode=True).flatten().tolist()
    return patches
