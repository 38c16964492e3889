"""The requests of a cell's experiment: drawn from its sizes, or replayed from a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ray_cluster.errors import ConfigError
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.arrivals import constant_rate, daily_rate
from ray_cluster.simulator.cell.experiment import CellExperiment, SizeShare
from ray_cluster.simulator.controlnets.add_ons import MIXES
from ray_cluster.simulator.experiment import MOST_REQUESTS
from ray_cluster.simulator.traces import MOST_SPAN_S, read_trace
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

MODEL = "model"

AloneS = Callable[[RequestView], float]
"""Seconds of a request with a device for itself."""


@dataclass(frozen=True)
class DrawnWorkload:
    """Requests of an experiment's sizes, at random instants."""

    experiment: CellExperiment

    @property
    def examples(self) -> tuple[RequestView, ...]:
        return tuple(example_of(self.kind_of(size)) for size in self.experiment.sizes)

    @property
    def classes(self) -> tuple[str, ...]:
        """Service classes, in the order of the file."""
        return tuple(dict.fromkeys(size.name for size in self.experiment.sizes))

    @property
    def words(self) -> str:
        experiment = self.experiment
        night = experiment.night
        course = "" if night is None else f" over a day, at night {night:g} of the peak's rate"
        add_ons = "" if experiment.add_ons == "none" else f", add-ons as of {experiment.add_ons}"
        return f"{experiment.duration_s:g} s of arrivals{course}{add_ons}"

    def kind_of(self, size: SizeShare) -> Kind:
        guidance = self.experiment.guidance if size.guidance is None else size.guidance
        return Kind(
            size.share,
            MODEL,
            size.width,
            size.height,
            size.steps or self.experiment.steps,
            uses_guidance=guidance,
            slo_class=size.name,
            priority=size.priority,
        )

    def slo_s(self, size: SizeShare, alone_s: AloneS) -> float:
        if size.slo_s is not None:
            return size.slo_s
        if size.slo_times_alone is None and self.experiment.slo_s is not None:
            return self.experiment.slo_s
        times = size.slo_times_alone or self.experiment.slo_times_alone
        return times * alone_s(example_of(self.kind_of(size)))

    def arrivals(self, rate_per_s: float, seed: int, alone_s: AloneS) -> list[Arrival]:
        experiment = self.experiment
        kinds = {self.kind_of(size): self.slo_s(size, alone_s) for size in experiment.sizes}
        add_ons = MIXES[experiment.add_ons]
        mix = Mix(tuple(kinds), kinds.__getitem__, add_ons.controlnets, add_ons.loras)
        if experiment.night is None:
            curve = constant_rate(rate_per_s, experiment.duration_s)
        else:
            curve = daily_rate(experiment.night * rate_per_s, rate_per_s, experiment.duration_s)
        drawn = draw_workload(mix, curve, seed=seed, cv=experiment.cv)
        if experiment.fewest_steps is None:
            return drawn
        return [replace(one, fewest_steps=experiment.fewest_steps) for one in drawn]


@dataclass(frozen=True)
class ReplayedWorkload:
    """Requests of a trace, at their instants or faster."""

    experiment: CellExperiment
    trace: tuple[Arrival, ...]

    @classmethod
    def of(cls, experiment: CellExperiment, path: Path) -> ReplayedWorkload:
        """Read a trace.

        Raises:
            ConfigError: it can't be read, has too many requests, or those of several models of
                which the experiment names none.
        """
        trace = read_trace(path)
        models = sorted({one.model for one in trace})
        if experiment.model not in models and (experiment.model or len(models) > 1):
            raise ConfigError(
                f"model: given {experiment.model!r}; the trace {path} has {', '.join(models)}"
            )
        trace = [one for one in trace if experiment.model in (None, one.model)]
        if len(trace) > MOST_REQUESTS:
            raise ConfigError(
                f"the trace {path} has {len(trace):,} requests; at most {MOST_REQUESTS:,} are "
                "possible"
            )
        span_s = trace[-1].arrival_s / min(experiment.speeds)
        if span_s > MOST_SPAN_S:
            raise ConfigError(
                f"speeds: given {min(experiment.speeds):g}, at which the trace {path} lasts "
                f"{span_s:,.0f} s; at most {MOST_SPAN_S:,.0f} s are possible"
            )
        return cls(experiment, tuple(replace(one, model=MODEL) for one in trace))

    @property
    def examples(self) -> tuple[RequestView, ...]:
        most_last = sorted(self.trace, key=lambda one: one.reference_px)
        by_size = {(one.width_px, one.height_px): one for one in most_last}
        largest_first = sorted(by_size, key=lambda size: (-size[0] * size[1], size))
        return tuple(example_of(by_size[size]) for size in largest_first)

    @property
    def classes(self) -> tuple[str, ...]:
        """Service classes in alphabetical order."""
        return tuple(sorted({one.slo_class for one in self.trace}))

    @property
    def words(self) -> str:
        span_s = self.trace[-1].arrival_s
        pace = f", {len(self.trace) / span_s:.3g} per second at speed 1" if span_s > 0 else ""
        num_edits = sum(one.mask_ratio is not None for one in self.trace)
        edits = f", {num_edits} of them edits, made as whole images" if num_edits else ""
        return f"{len(self.trace)} requests in {span_s:g} s of {self.experiment.trace}{pace}{edits}"

    def arrivals(self, speed: float, _seed: int, alone_s: AloneS) -> list[Arrival]:
        experiment = self.experiment
        found = []
        for one in self.trace:
            slo_s = one.slo_s
            if math.isinf(slo_s):
                times = experiment.slo_times_alone
                slo_s = experiment.slo_s or times * alone_s(example_of(one))
            found.append(replace(one, arrival_s=one.arrival_s / speed, slo_s=slo_s))
        return found


def example_of(one: Kind | Arrival) -> RequestView:
    """Return a request without a deadline."""
    return RequestView(
        request_id=one.slo_class,
        model=MODEL,
        width_px=one.width_px,
        height_px=one.height_px,
        num_steps=one.num_steps,
        uses_guidance=one.uses_guidance,
        priority=0,
        arrival_s=0.0,
        deadline_s=math.inf,
        reference_px=one.reference_px if isinstance(one, Arrival) else 0,
    )
