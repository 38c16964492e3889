"""Merges the LoRAs that are alone in an engine into its model, and takes them out again."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.step.executor import Executor
from ray_cluster.engine.step.step_call import Held
from ray_cluster.engine.step.step_engine import StepEngine, StepReport
from ray_cluster.errors import MODEL_ERRORS, ModelUnsupported
from ray_cluster.policies.steps.lora_merging import MergedRun, MergeView, decide_merge

logger = logging.getLogger(__name__)

# latest requests by which a set's share is known
_NUM_LATEST = 32
# of a step's time, for which merged weights are made after it
_SLICE_SHARE = 0.1
# for which nothing is merged after requests of other sets were announced
_DWELL_S = 1.0
# until the dispatcher has heard of a change, about
_NOTICE_S = 0.02
# assumed until measured: of making a byte of weights, and of deltas over a step without
_MAKE_BYTE_S = 2e-9
_DELTA_SHARE = 0.1
# weight of the latest measurement
_LATEST = 0.2
_MOST_SHAPES = 64

_Shape = tuple[int, int, int]


class Merger:
    """Acts on the policy between the steps of one engine. The step thread calls it, except for what
    is said to be for any thread.

    Merged weights are made a few at a time, after each step for a tenth of its time. They stay in
    memory until another set's are made: to put them in place again takes microseconds.

    Args:
        executor: the engine's.
        max_bytes: that merged weights may take, and what making them needs beside them.
        clock: monotonic seconds.

    Attributes:
        num_merges: how often merged weights took the places of the model's own.
        num_unmerges: how often these took theirs again.
    """

    def __init__(
        self,
        engine: StepEngine,
        executor: Executor[Any, Any],
        *,
        max_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._max_bytes = max_bytes
        self._clock = clock
        self.num_merges = self.num_unmerges = 0
        self._name = ""
        # made, or being made; of a set that may be next
        self._weights: MergedWeights | None = None
        self._candidate: MergedWeights | None = None
        self._refused: set[str] = set()
        self._others_until_s = clock()
        self._latest: deque[str] = deque(maxlen=_NUM_LATEST)
        self._set_by_id: dict[str, str] = {}
        self._paid_s = 0.0
        self._make_byte_s = _MAKE_BYTE_S
        self._costs = _DeltaCosts()

    @property
    def merged(self) -> str:
        """The set that is merged and may stay so; else empty. For any thread."""
        is_kept = self._clock() >= self._others_until_s
        return self._name if is_kept and self._engine.weights.merged is not None else ""

    def note_others(self) -> None:
        """Note that requests of other sets wait for this replica. For any thread."""
        self._others_until_s = self._clock() + _DWELL_S

    def after_step(self, report: StepReport) -> None:
        """Learn from a step, and do what the policy says."""
        rows, was_merged = self._engine.rows, self._engine.weights.merged is not None
        self._note_rows(rows)
        self._count()
        has_deltas = not was_merged and any(map(self._set_by_id.get, report.stepped))
        if not (report.failed or report.late or report.num_reused):
            self._learn(report, has_deltas=has_deltas)
        self._set_by_id = {name: self._set_by_id[name] for name in rows}
        alone = _alone(rows)
        if alone is None:
            if rows:
                self._paid_s = 0.0
            return
        self._decide(alone, report.duration_s, was_merged=was_merged)
        self._count()

    def _note_rows(self, rows: Mapping[str, Held]) -> None:
        for name, row in rows.items():
            if name not in self._set_by_id:
                self._set_by_id[name] = _set_of(row)
                self._latest.append(_set_of(row))

    def _count(self) -> None:
        """Count changes, those that a new row has made among them."""
        is_in = self._engine.weights.merged is not None
        was_in = self.num_merges > self.num_unmerges
        self.num_merges += is_in and not was_in
        self.num_unmerges += was_in and not is_in

    def _learn(self, report: StepReport, *, has_deltas: bool) -> None:
        """Note how long a step took whose rows all had deltas to compute, or none."""
        sets = {self._set_by_id.get(name) for name in report.stepped}
        if len(sets) != 1 or None in sets:
            return
        work = report.work
        shape = (len(report.stepped), round(work.megapixels * 1e6), work.num_sizes)
        self._costs.observe(shape, report.duration_s, has_deltas=has_deltas)

    def _decide(self, rows: list[Held], duration_s: float, *, was_merged: bool) -> None:
        name, deltas = _set_of(rows[0]), rows[0].deltas
        assert deltas is not None, "rows without any are not merged"
        weights = None if name in self._refused else self._weights_of(name, deltas)
        if weights is None:
            return
        step_s = duration_s if was_merged else duration_s / (1 + self._costs.share)
        delta_s = step_s * self._costs.share
        self._paid_s += 0.0 if was_merged else delta_s
        steps = [row.table.num_calls for row in rows]
        view = MergeView(
            is_merged=was_merged,
            run=MergedRun(step_s, weights.num_bytes_left * self._make_byte_s, _NOTICE_S),
            delta_s=delta_s,
            paid_s=self._paid_s,
            num_others=int(self._clock() < self._others_until_s),
            share=self._latest.count(name) / max(1, len(self._latest)),
            steps_left=max(row.table.num_calls - row.state.step_index for row in rows),
            steps_per_request=fmean(steps) / len(rows),
        )
        match decide_merge(view):
            case "merge":
                self._merge(name, weights, _SLICE_SHARE * duration_s)
            case "unmerge":
                self._engine.weights.unmerge()
                self._paid_s = 0.0
            case "stay":
                pass

    def _weights_of(self, name: str, deltas: LayerDeltas) -> MergedWeights | None:
        """Return a set's weights, made or not; None if it cannot be merged."""
        for known in (self._weights, self._candidate):
            if known is not None and known.deltas is deltas:
                return known
        try:
            found = self._executor.merged(deltas)
        except ModelUnsupported as error:
            self._refuse(name, str(error))
            return None
        if found.peak_bytes > self._max_bytes:
            reason = f"{found.peak_bytes} bytes are needed, and {self._max_bytes} are left"
            self._refuse(name, f"{reason}; raise memory_gib or lower max_batch")
            return None
        self._candidate = found
        return found

    def _refuse(self, name: str, reason: str) -> None:
        logger.info("LoRAs %s are not merged: %s", name, reason)
        self._refused.add(name)

    def _merge(self, name: str, weights: MergedWeights, slice_s: float) -> None:
        """Make more of a set's weights, and put them in place if these were the last."""
        if weights is not self._weights:
            # dropped first: there may be no memory for both
            self._weights, self._candidate = weights, None
        try:
            self._make(weights, slice_s)
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            self._weights = None
            self._refuse(name, f"{type(error).__name__}: {error}")
            return
        if weights.is_made:
            self._engine.weights.merge(weights)
            self._name = name

    def _make(self, weights: MergedWeights, slice_s: float) -> None:
        began_s, bytes_before = self._clock(), weights.num_bytes_left
        while not weights.is_made and self._clock() - began_s < slice_s:
            weights.make_next()
        if (num_bytes := bytes_before - weights.num_bytes_left) > 0:
            rate_s = (self._clock() - began_s) / num_bytes
            self._make_byte_s += _LATEST * (rate_s - self._make_byte_s)


class _DeltaCosts:
    """What deltas add to steps, as a share of those without, by pairs of steps of one shape."""

    def __init__(self) -> None:
        self.share = _DELTA_SHARE
        # None after the first step of a shape, which makes its kernels and indices
        self._known_s: OrderedDict[tuple[_Shape, bool], float | None] = OrderedDict()

    def observe(self, shape: _Shape, duration_s: float, *, has_deltas: bool) -> None:
        key = (shape, has_deltas)
        if key not in self._known_s:
            self._known_s[key] = None
        else:
            known_s = self._known_s[key]
            change_s = 0.0 if known_s is None else _LATEST * (duration_s - known_s)
            self._known_s[key] = duration_s if known_s is None else known_s + change_s
        self._known_s.move_to_end(key)
        while len(self._known_s) > _MOST_SHAPES:
            self._known_s.popitem(last=False)
        with_s, without_s = (self._known_s.get((shape, one)) for one in (True, False))
        if with_s is not None and without_s:
            self.share += _LATEST * (with_s / without_s - 1 - self.share)


def _set_of(row: Held) -> str:
    return "" if row.deltas is None else row.state.request.add_ons.lora_set


def _alone(rows: Mapping[str, Held]) -> list[Held] | None:
    """Return all rows if they have the same deltas, None if they have not, or there are none."""
    found = list(rows.values())
    if not found or not _set_of(found[0]):
        return None
    return found if all(row.deltas is found[0].deltas for row in found) else None
