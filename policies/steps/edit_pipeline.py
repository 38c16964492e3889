"""Which blocks of an edited image take cached activations, and which are computed whole.

While a block is computed, the next one's cached activations come from host memory. A block that
uses its cache computes only the masked tokens, but must wait for its activations. InstGenIE
(section 4.2) decides block by block; here the choice is optimal, by dynamic programming over the
states (load, compute) that no other state is better than in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# sums in another order differ by less than this many seconds
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds that one block takes.

    Attributes:
        load_s: to bring the cached activations of its unmasked tokens to the GPU.
        cached_s: to compute its masked tokens, with the rest from the cache.
        whole_s: to compute all of its tokens.
    """

    load_s: float
    cached_s: float
    whole_s: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(t) and t >= 0 for t in (self.load_s, self.cached_s, self.whole_s)):
            raise ValueError(f"times must be finite and not negative; given {self}")


@dataclass(frozen=True, slots=True)
class EditPlan:
    """What every block does, and when the last one is done.

    Attributes:
        uses_cache: by block, in their order.
        finish_s: when the last block is computed.
        loaded_s: when the last activations have come.
    """

    uses_cache: tuple[bool, ...]
    finish_s: float
    loaded_s: float


@dataclass(frozen=True, slots=True)
class _State:
    """The first blocks decided: when loading and computing are done, and the way here."""

    loaded_s: float
    computed_s: float
    uses_cache: bool = False
    before: _State | None = None


def plan_blocks(blocks: Sequence[BlockTimes]) -> EditPlan:
    """Return the plan that finishes first; of several such, the one that loads least.

    O(n^2) where all blocks load equally long: of states with as many loads only the one furthest in
    computing survives. States that can't beat the greedy plan are dropped.
    """
    cheapest_s = [min(block.cached_s, block.whole_s) for block in blocks]
    # what the blocks after each one take at least
    least_s = [*accumulate(reversed(cheapest_s), initial=0.0)][-2::-1]
    bound_s = plan_blocks_greedily(blocks).finish_s + _ROUNDING
    states = [_State(0.0, 0.0)]
    for block, rest_s in zip(blocks, least_s, strict=True):
        followings = [one for state in states for one in _followings(state, block)]
        states = _undominated([one for one in followings if one.computed_s + rest_s <= bound_s])
    return _plan(min(states, key=lambda state: (state.computed_s, state.loaded_s)))


def plan_blocks_greedily(blocks: Sequence[BlockTimes]) -> EditPlan:
    """Return the plan in which every block by itself is computed as early as it can be.

    Algorithm 1 of InstGenIE (section 4.2): loads for blocks that gain little delay those of others.
    """
    state = _State(0.0, 0.0)
    for block in blocks:
        state = min(_followings(state, block), key=lambda following: following.computed_s)
    return _plan(state)


def _followings(state: _State, block: BlockTimes) -> tuple[_State, _State]:
    loaded_s = state.loaded_s + block.load_s
    return (
        _State(loaded_s, max(loaded_s, state.computed_s) + block.cached_s, True, state),
        _State(state.loaded_s, state.computed_s + block.whole_s, False, state),
    )


def _undominated(states: Sequence[_State]) -> list[_State]:
    """The states that none of the others is at least as good as, in both respects."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda one: (one.loaded_s, one.computed_s)):
        if not kept or state.computed_s < kept[-1].computed_s:
            kept.append(state)
    return kept


def _plan(last: _State) -> EditPlan:
    choices: list[bool] = []
    state = last
    while state.before is not None:
        choices.append(state.uses_cache)
        state = state.before
    return EditPlan(tuple(reversed(choices)), last.computed_s, last.loaded_s)
