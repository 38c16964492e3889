"""The engine of a group: several requests step beside each other, each on a set of ranks.

All states are here, and a step is a call of the model on some ranks, so that a request's degree
changes between two steps without moving anything of it. Which request steps on how many ranks is
decided at every arrival and end by :mod:`ray_cluster.policies.sequence_parallel.rounds` (TetriServe
section 4.2 decides in rounds of a fixed length), and where by
:mod:`ray_cluster.policies.sequence_parallel.sets`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.groups.degree_costs import DegreeCosts, Way
from ray_cluster.engine.groups.group_executor import GroupExecutor
from ray_cluster.engine.groups.ranks import RankStep, StepEnd
from ray_cluster.engine.groups.tally import Tally
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.step.mixed_step import advance, call_of, prepare_rows
from ray_cluster.engine.step.reuse_steps import Turn
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_call import Call, Held, LateLoras, SamplerInputs
from ray_cluster.engine.step.step_engine import (
    FailedRow,
    PreviewLatents,
    StepEngine,
    StepReport,
)
from ray_cluster.errors import MODEL_ERRORS, RequestFailed
from ray_cluster.policies.costs.cost_model import work_of
from ray_cluster.policies.sequence_parallel.menus import is_apart, menu_of_request
from ray_cluster.policies.sequence_parallel.sets import Seat, launches, seat
from ray_cluster.policies.sequence_parallel.types import (
    GroupRequest,
    GroupView,
    Planner,
)
from ray_cluster.policies.types import GroupCost, RequestView, StepCost

# times that a step of a request is lost with its ranks, one after the other, until it has failed
_MOST_LOST = 3


@dataclass(slots=True)
class _Turn:
    """What a group knows of one of its requests beside its state.

    Attributes:
        number: by which policies know it.
        degree: ranks that it is to have from its next step on.
        held: the set that it steps on, or stepped on last.
        step: the one in flight.
        num_lost: times that its present step was lost with its ranks.
    """

    number: int
    degree: int = 0
    target: range | None = None
    held: range | None = None
    step: _Step | None = None
    num_lost: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step in flight; its ranks are busy even if its request is gone.

    Attributes:
        ready_s: when it is expected to end.
    """

    row: Held
    way: Way
    ranks: range
    call: Call
    view: RequestView
    ready_s: float


@dataclass(slots=True)
class _Seen:
    """What :meth:`GroupEngine.step` reports."""

    stepped: list[RequestView] = field(default_factory=list)
    finished: list[RequestState] = field(default_factory=list)
    failed: list[FailedRow] = field(default_factory=list)
    previews: list[PreviewLatents] = field(default_factory=list)
    duration_s: float = 0.0


class GroupEngine(StepEngine):
    """A :class:`StepEngine` whose rows step on ranks of a group.

    :meth:`step` never waits: it takes in what has ended, decides if something has come or gone, and
    begins the steps that can begin. Whoever calls it is to be woken when ranks have news.

    Args:
        executor: asks the ranks.
        costs: by degree; corrected by every step.
        planner: which request gets how many ranks.

    Attributes:
        costs: by degree.
        tally: what the ranks have done.
    """

    def __init__(
        self,
        executor: GroupExecutor,
        tables: SamplerTables,
        clock: Callable[[], float],
        *,
        costs: DegreeCosts,
        planner: Planner,
    ) -> None:
        super().__init__(executor, lambda _rows, _now_s: (), tables, clock)
        self._group_executor, self._ranks = executor, executor.ranks
        self.costs, self._planner = costs, planner
        self._turns: dict[str, _Turn] = {}
        self._steps: dict[int, _Step] = {}
        self._numbers = itertools.count()
        self._is_changed = False
        self._look_again_s = math.inf
        self._last_look_s = 0.0
        self.tally = Tally()

    @property
    def step_cost(self) -> StepCost:
        """What a step costs of a request that has as many ranks as it can use."""
        return self.costs.current.costs[-1].cost

    @property
    def seats(self) -> dict[str, tuple[int, ...]]:
        """The ranks of the steps in flight, by request; from any thread."""
        return {one.view.request_id: tuple(one.ranks) for one in list(self._steps.values())}

    @property
    def can_step(self) -> bool:
        """Whether :meth:`step` has something to do now."""
        if self._ranks.has_news:
            return True
        return self._ranks.is_up and (self._is_changed or self._clock() >= self._look_again_s)

    def add(self, row: RequestState, deltas: LayerDeltas | None = None) -> None:
        """Take an encoded request; see :meth:`StepEngine.add`."""
        super().add(row, deltas)
        self._turns[row.request.request_id] = _Turn(next(self._numbers))
        self._is_changed = True

    def add_loras(self, state: RequestState, loras: LateLoras) -> None:
        """Give a row what it is to have after its first steps; see :meth:`StepEngine.add_loras`."""
        super().add_loras(state, loras)
        self._is_changed = True

    def abort(self, request_id: str) -> bool:
        """Drop a request; a step of it that is in flight goes on, for nobody."""
        row = self.rows.get(request_id)
        if row is not None:
            self._forget(row.prepared)
            del self._turns[request_id]
            self._is_changed = True
        return super().abort(request_id)

    def step(self) -> StepReport:
        """Take in the steps that have ended, decide if need be, and begin others."""
        seen, num_busy = _Seen(), sum(len(one.ranks) for one in self._steps.values())
        self.tally.pass_time(self._clock(), num_busy, self._ranks.num_ranks)
        for end in self._ranks.ends():
            self._take(end, seen)
        for state in (*seen.finished, *(one.state for one in seen.failed)):
            self.abort(state.request.request_id)
        if self._ranks.is_up:
            now_s = self._clock()
            if self._is_changed or now_s >= self._look_again_s:
                self._is_changed = False
                self._decide(now_s)
            self._launch(now_s)
        return StepReport(
            stepped=tuple(one.request_id for one in seen.stepped),
            finished=tuple(seen.finished),
            failed=tuple(seen.failed),
            previews=tuple(seen.previews),
            duration_s=seen.duration_s,
            work=work_of(seen.stepped),
        )

    def _take(self, end: StepEnd, seen: _Seen) -> None:
        """Make a step that has ended its row's own, unless that is gone."""
        step = self._steps.pop(end.call)
        state = step.row.state
        request_id = state.request.request_id
        if self.rows.get(request_id) is not step.row:
            return
        turn = self._turns[request_id]
        turn.step = None
        if end.prediction is None:
            turn.num_lost += end.is_suspect
            self.tally.num_lost += 1
            self._is_changed = True
            if turn.num_lost >= _MOST_LOST:
                text = f"its step was lost with the group's ranks {turn.num_lost} times"
                seen.failed.append(FailedRow(state, RequestFailed(text, "denoise")))
            return
        turn.num_lost = 0
        failed = self._advanced(step, end.prediction)
        if failed is None:
            self.costs.observe(step.view, step.way, end.seconds)
            self.tally.stepped(step.way.degree, end.seconds)
            degree = step.way.degree
            state.steps_by_degree[degree] = state.steps_by_degree.get(degree, 0) + 1
            seen.stepped.append(step.view)
            seen.duration_s = max(seen.duration_s, end.seconds)
            if step.row.is_done:
                seen.finished.append(state)
            elif state.is_preview_due:
                seen.previews.append(PreviewLatents(state, state.estimate, state.step_index))
        else:
            seen.failed.append(failed)
        if failed is not None or step.row.is_done or not step.row.is_ready:
            self._is_changed = True

    def _advanced(self, step: _Step, prediction: Tensor) -> FailedRow | None:
        """Take a row's step with a prediction; return it if that has failed."""
        row = step.row
        try:
            update = SamplerInputs.of(step.call, ())
            advanced = advance(update, self._executor.device, prediction, [Turn()])
        except MODEL_ERRORS as error:
            text = f"{type(error).__name__}: {error}"
            return FailedRow(row.state, RequestFailed(text, "denoise"))
        failed = self._commit([row], advanced)
        return failed[0] if failed else None

    def _decide(self, now_s: float) -> None:
        """Decide which request has how many ranks from its next step on, and which."""
        rows = [(self._turns[key], row) for key, row in self.rows.items() if row.is_ready]
        for turn in self._turns.values():
            turn.degree, turn.target = 0, None
        costs = self.costs.current
        requests = tuple(self._seen(turn, row, now_s, costs) for turn, row in rows)
        view = GroupView(self._ranks.num_ranks, now_s, requests, costs.switch_s, self._last_look_s)
        decision = self._planner(view)
        self._look_again_s = self._last_look_s = decision.look_again_s
        for (turn, _), degree in zip(rows, decision.degrees, strict=True):
            turn.degree = degree
        turns = [turn for turn, _ in rows]
        targets = seat([_seat_of(turn) for turn in turns], self._ranks.num_ranks)
        for turn, target in zip(turns, targets, strict=True):
            turn.target = target

    def _seen(self, turn: _Turn, row: Held, now_s: float, costs: GroupCost) -> GroupRequest:
        """Return what policies know of a request."""
        view = self._view(row)
        step = turn.step
        left = row.table.num_calls - row.state.step_index - (step is not None)
        return GroupRequest(
            request_id=turn.number,
            menu=menu_of_request(view, costs),
            steps_left=left,
            arrival_s=row.state.arrival_s,
            deadline_s=row.state.deadline_s,
            has_begun=turn.held is not None,
            degree=0 if step is None else step.way.degree,
            target=turn.degree,
            ready_s=0.0 if step is None else max(now_s, step.ready_s),
        )

    def _view(self, row: Held) -> RequestView:
        state = row.state
        return state.request.view(
            arrival_s=state.arrival_s,
            deadline_s=state.deadline_s,
            steps_done=min(state.step_index, state.request.num_steps - 1),
        )

    def _launch(self, now_s: float) -> None:
        """Begin the steps of rows at a boundary whose ranks are free."""
        rows = [(self._turns[key], row) for key, row in self.rows.items() if row.is_ready]
        seats, targets = [_seat_of(turn) for turn, _ in rows], [turn.target for turn, _ in rows]
        for step in self._orphans():
            # of requests that are gone: their ranks are busy all the same
            seats.append(Seat(-1, 0, step.ranks, is_stepping=True))
            targets.append(None)
        for index, ranks in launches(seats, targets):
            turn, row = rows[index]
            self._begin(turn, row, ranks, now_s)

    def _orphans(self) -> Sequence[_Step]:
        return [
            step
            for step in self._steps.values()
            if self.rows.get(step.view.request_id) is not step.row
        ]

    def _begin(self, turn: _Turn, row: Held, ranks: range, now_s: float) -> None:
        before = row.prepared
        row.begin_step()
        if row.prepared is None:
            # its LoRAs have come
            self._forget(before)
        prepare_rows([row], self._group_executor)
        view = self._view(row)
        call, _ = call_of([row], [Turn()], self._group_executor)
        costs = self.costs.current
        (cost,) = (one for one in costs.costs if one.degree == len(ranks))
        way = Way(len(ranks), "apart" if is_apart(view, cost) else "together")
        menu = menu_of_request(view, costs)
        expected_s = menu.step_s[menu.level_of(way.degree)]
        step = _Step(row, way, ranks, call, view, now_s + expected_s)
        number = next(self._numbers)
        self.tally.num_switches += turn.held is not None and turn.held != ranks
        turn.held, turn.step, self._steps[number] = ranks, step, step
        self._ranks.begin(
            RankStep(
                call=number,
                key=row.prepared,
                ranks=ranks,
                rows=way.rows,
                latent_hw=(row.state.latents.shape[1], row.state.latents.shape[2]),
                latents=call.batch.latents,
                timestep=float(call.batch.timesteps[0]),
                guidance_scale=float(call.batch.guidance_scales[0]),
            )
        )

    def _forget(self, key: int | None) -> None:
        if key is not None:
            self._ranks.forget(key)


def _seat_of(turn: _Turn) -> Seat:
    return Seat(turn.number, turn.degree, turn.held, is_stepping=turn.step is not None)
