"""Experiments with a control loop: what their files and policies have in common, and one run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr

from ray_cluster.control.loop import ControlLoop, RoundReport
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.policies.planning.plan import Plan, planned_settings_of
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.simulator.cell.cell import Fate
from ray_cluster.simulator.control.cluster import SimulatedCluster
from ray_cluster.simulator.control.course import Course, course_of
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.experiment import MOST_REQUESTS, Experiment, load_choices
from ray_cluster.simulator.reports import Line
from ray_cluster.simulator.results import Row
from ray_cluster.simulator.workload import Arrival

_MOST_ROUNDS = 100_000
# with fewer expected a seed may have none at all
_FEWEST_REQUESTS = 50

Rate = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]
PeriodSeconds = Annotated[
    float, Field(ge=0.1, le=3600, description="from one round of planning to the next")
]
LoadSeconds = Annotated[float, Field(ge=0, le=3600, description="until a replica serves")]
GapCv = Annotated[float, Field(ge=0, le=3, description="of the gaps between arrivals")]


class Column(NamedTuple):
    """A figure of every run: its key in rows and JSON, its title in tables and plots, the factor
    from the row's unit to the title's, and decimals.
    """

    key: str
    title: str
    factor: float = 1.0
    digits: int = 1


class ControlPolicy(NamedTuple):
    """A policy: settings where an experiment names no file of choices, and what makes its planner,
    called with the fleet, the experiment and the settings.
    """

    name: str
    defaults: Mapping[str, float]
    build: Callable[..., Planner[Any]]


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings of a policy for experiments of a kind, found by a search or its defaults."""

    kind: str
    policy: str
    settings: Mapping[str, float]
    chosen_by: Literal["search", "default"]


class Round(NamedTuple):
    """One round of the control loop: the state that it saw, and what it did."""

    state: ClusterState
    report: RoundReport


class ControlRun(NamedTuple):
    """Everything that happened in one run; GPU-hours are those held, loading or serving."""

    requests: Sequence[Arrival]
    fates: Sequence[Fate]
    rounds: Sequence[Round]
    course: Course
    gpu_hours: float

    @property
    def num_plan_changes(self) -> int:
        """Rounds that started or stopped replicas."""
        return sum(bool(one.report.actions and one.report.actions.scales) for one in self.rounds)


@dataclass(frozen=True, slots=True)
class ControlRow(Row):
    """What one run found, with its course over time."""

    course: Course | None = None


class Setting(NamedTuple):
    """An experiment with what its files say, ready to be simulated.

    Attributes:
        fleet: pools and services.
        profiles: of each model.
        num_gpus: of each type, as the fleet calls it.
        columns: figures of every run; `words` say what they mean, and `axes` are those of the plot
            of all policies.
    """

    fleet: Fleet
    profiles: Sequence[LatencyProfile]
    num_gpus: dict[str, int]
    columns: Sequence[Column]
    words: str
    axes: tuple[Column, Column]


class ControlExperiment(Experiment):
    """What every experiment with a control loop says, and what each kind of them adds.

    Attributes:
        POLICIES: that can be compared.
        TRADE_OFF: name and title of the plot of all policies.
        BARS: what the timeline's bars stand for.
        STREAM: of a seed, the stream of random numbers of the cluster.
    """

    POLICIES: ClassVar[tuple[ControlPolicy, ...]]
    TRADE_OFF: ClassVar[tuple[str, str]]
    BARS: ClassVar[str]
    STREAM: ClassVar[int]

    choices: Path | None = Field(None, description="settings of the policies, beside the file")
    duration_s: Seconds
    period_s: PeriodSeconds
    load_s: LoadSeconds
    noise_cv: float = Field(
        0.03, ge=0, le=1, description="of the seconds of equal batches, and of loads"
    )
    batching_gain: float = Field(
        1.0, gt=0, le=10, description="factor on what a batch saves against its images one by one"
    )
    _folder: Path = PrivateAttr(Path())

    def located(self, folder: Path) -> Self:
        """Return the experiment of a file in the folder, where the files that it names lie too."""
        located = self.model_copy()
        located._folder = folder
        return located

    def check_rounds(self) -> None:
        """Refuse too many rounds; ValueError."""
        if self.span_s > _MOST_ROUNDS * self.period_s:
            raise ValueError(
                f"{self.span_s:g} s, with the last deadlines, and period_s {self.period_s:g} are "
                f"more than {_MOST_ROUNDS:,} rounds: shorten the day or plan less often"
            )

    @abstractmethod
    def setting(self) -> Setting:
        """Read the files that it names.

        Raises:
            ConfigError: one can't be read.
            ValueError: it lacks what is needed.
        """

    @property
    @abstractmethod
    def span_s(self) -> float:
        """Seconds from the first request until all deadlines have passed."""

    @abstractmethod
    def requests(self, seed: int) -> list[Arrival]:
        """The requests of a seed, in the order of arrival."""

    @abstractmethod
    def initial(self, planner: Planner[Any]) -> Plan:
        """The replicas that have loaded when the day begins."""

    @abstractmethod
    def figures_of(self, run: ControlRun) -> dict[str, float]:
        """The figures of a run, by the columns' keys, and `num_requests`."""

    @abstractmethod
    def panels(self, courses: Mapping[str, Course]) -> dict[str, dict[str, Line]]:
        """What is shown over time of some policies, by the label of the y axis."""

    @property
    def bin_width_s(self) -> float:
        return 60.0

    @property
    def faults(self) -> Faults | None:
        return None

    @property
    def young_s(self) -> float:
        return 0.0

    def shows(self, policy: str, seed: int) -> bool:
        """Whether a run is shown over time: the first two policies on the first seed."""
        return policy in self.policies[:2] and seed == self.first_seed

    def policy(self, name: str) -> ControlPolicy:
        """Return a policy by its name; ValueError if there is none."""
        for one in self.POLICIES:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.POLICIES)
        raise ValueError(f"policies: there is no policy {name!r}; there are {known}")

    def tuned(self) -> list[TunedSettings]:
        """Return the settings of the experiment's policies.

        Raises:
            ConfigError: a profile or the file of choices can't be read.
            ValueError: there is no such policy, nothing was chosen for it, or it can't plan this.
        """
        read: dict[tuple[str, str], TunedSettings] = {}
        if self.choices is not None:
            found = load_choices(self._folder / self.choices, TunedSettings)
            read = {(one.kind, one.policy): one for one in found}
        fleet = self.setting().fleet
        return [self._tuned(self.policy(name), fleet, read) for name in self.policies]

    def _tuned(
        self, policy: ControlPolicy, fleet: Fleet, read: Mapping[tuple[str, str], TunedSettings]
    ) -> TunedSettings:
        chosen = TunedSettings(self.kind, policy.name, policy.defaults, "default")
        if self.choices is not None:
            if (self.kind, policy.name) not in read:
                raise ValueError(
                    f"policies: given {policy.name!r}, for which {self.choices} has no settings; "
                    "add some, or leave choices out for the defaults"
                )
            chosen = read[self.kind, policy.name]
            if chosen.settings.keys() != policy.defaults.keys():
                raise ValueError(
                    f"choices: given {dict(chosen.settings)} for {policy.name!r}; allowed: "
                    f"{', '.join(policy.defaults)}"
                )
        try:
            policy.build(fleet, self, **chosen.settings)
        except ValueError as error:
            raise ValueError(f"policies: given {policy.name!r}: {error}") from None
        return chosen


def check_day(low_per_s: float, high_per_s: float, duration_s: float) -> None:
    """Refuse a day of no or of too many requests; ValueError."""
    if low_per_s > high_per_s:
        raise ValueError(
            f"low_per_s must be at most high_per_s, {high_per_s:g}; given {low_per_s:g}"
        )
    if not _FEWEST_REQUESTS <= high_per_s * duration_s / 2 <= MOST_REQUESTS:
        raise ValueError(
            f"high_per_s {high_per_s:g} for duration_s {duration_s:g} are some "
            f"{high_per_s * duration_s / 2:,.0f} requests a run; allowed: {_FEWEST_REQUESTS} to "
            f"{MOST_REQUESTS:,}"
        )


def run_policy(
    experiment: ControlExperiment, name: str, settings: Mapping[str, float], seed: int
) -> ControlRow:
    """Simulate a policy with certain settings on a seed."""
    fleet = experiment.setting().fleet
    planner = experiment.policy(name).build(fleet, experiment, **settings)
    return run_planner(experiment, name, planner, seed)


def run_planner(
    experiment: ControlExperiment, name: str, planner: Planner[Any], seed: int
) -> ControlRow:
    """Simulate a planner on a seed, from replicas that have loaded already."""
    events, initial, setting = EventQueue(), experiment.initial(planner), experiment.setting()
    cluster = SimulatedCluster(
        events,
        setting.fleet,
        setting.num_gpus,
        np.random.default_rng([seed, experiment.STREAM]),
        noise_cv=experiment.noise_cv,
        faults=experiment.faults,
        dwell_s=experiment.young_s,
    )
    cluster.apply(planned_settings_of(initial))
    for pool in initial.pools:
        cluster.scale(pool.pool, pool.num_replicas)
    begin_s = begin_of(experiment)
    events.run(begin_s)
    hours_before, rounds = cluster.gpu_hours, list[Round]()
    requests = [
        replace(one, arrival_s=begin_s + one.arrival_s) for one in experiment.requests(seed)
    ]

    def note(report: RoundReport) -> None:
        assert loop.state is not None
        rounds.append(Round(loop.state, report))

    loop = ControlLoop(planner, cluster, events, on_round=note, applied=initial)
    loop.start(events, experiment.period_s)
    arrivals_s = [one.arrival_s for one in requests]
    events.at_each(arrivals_s, lambda number: cluster.offer(requests[number]))
    events.run(begin_s + experiment.span_s)
    loop.stop()
    gpu_hours = cluster.gpu_hours - hours_before
    cluster.cell.run_out()
    # requests that were never served are late as well
    assert len(cluster.fates) + cluster.cell.num_open == len(requests)
    states = [one.state for one in rounds]
    course = course_of(
        requests, cluster.fates, states, begin_s=begin_s, bin_s=experiment.bin_width_s
    )
    run = ControlRun(requests, cluster.fates, rounds, course, gpu_hours)
    return ControlRow(name, seed, experiment.figures_of(run), course=course)


def begin_of(experiment: ControlExperiment) -> float:
    """Return the instant at which the day begins: when the first loads are over, however noisy."""
    return 3 * experiment.load_s
