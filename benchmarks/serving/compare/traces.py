"""Requests at random instants, the same for every contender and, but for the pace, every load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.serving.compare.settings import CV_BY_PROCESS, GUIDANCE, Process, Settings, Shape
from benchmarks.settings import MODEL
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

# requests are drawn for a trace this many times longer than needed, and its beginning is used
_SPARE = 3
_SEEDS_APART = 1_000_000


@dataclass(frozen=True, slots=True)
class Planned:
    """One request.

    Attributes:
        arrival_s: from the trace's beginning.
        seed: of its noise.
        slo_s: from arrival to the deadline.
    """

    arrival_s: float
    shape: Shape
    prompt: str
    seed: int
    slo_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, at the pace of load 1."""

    name: str
    requests: tuple[Planned, ...]

    def at(self, load: float) -> Trace:
        """Return the same requests with that many times the pace; deadlines stay."""
        faster = (replace(one, arrival_s=one.arrival_s / load) for one in self.requests)
        return Trace(self.name, tuple(faster))

    def arrivals(self) -> list[Arrival]:
        """Return it as the simulator has it."""
        return [
            Arrival(
                arrival_s=one.arrival_s,
                model=MODEL,
                width_px=one.shape.width_px,
                height_px=one.shape.height_px,
                num_steps=one.shape.num_steps,
                uses_guidance=GUIDANCE > 1,
                slo_s=one.slo_s,
                slo_class=one.shape.size,
            )
            for one in self.requests
        ]


def draw_traces(
    settings: Settings,
    prompts: Sequence[str],
    *,
    rate_per_s: float,
    alone_s: Mapping[str, float],
) -> list[Trace]:
    """Draw all traces of a comparison, processes in turns.

    Args:
        prompts: drawn for the requests.
        rate_per_s: of load 1.
        alone_s: seconds of an image alone, by the name of its shape.
    """
    shapes = {shape.name: shape for shape in settings.shapes}
    kinds = tuple(
        Kind(1.0, MODEL, one.width_px, one.height_px, one.num_steps, slo_class=name)
        for name, one in shapes.items()
    )
    mix = Mix(kinds, lambda kind: settings.slo_times * alone_s[kind.slo_class])
    curve = constant_rate(rate_per_s, _SPARE * settings.num_requests / rate_per_s)

    def draw(process: Process, number: int) -> Trace:
        # another stream for each process: equal numbers must not mean equal mixes
        seed = settings.first_seed + 1000 * list(CV_BY_PROCESS).index(process) + number
        drawn = draw_workload(mix, curve, seed=seed, cv=CV_BY_PROCESS[process])
        if len(drawn) < settings.num_requests:
            raise RuntimeError(f"seed {seed} gives {len(drawn)} requests; take another first_seed")
        words = np.random.default_rng([seed, len(kinds)]).integers(len(prompts), size=len(drawn))
        planned = (
            Planned(
                one.arrival_s,
                shapes[one.slo_class],
                prompts[words[index]],
                seed * _SEEDS_APART + index,
                one.slo_s,
            )
            for index, one in enumerate(drawn[: settings.num_requests])
        )
        return Trace(f"{process}-{number}", tuple(planned))

    return [
        draw(process, number)
        for number in range(settings.num_traces)
        for process in settings.processes
    ]
