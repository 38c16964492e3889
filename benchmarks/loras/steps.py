"""What LoRAs add to a step of the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.figures import paired_ratio, scaled
from benchmarks.harness import Plot, Study, cpu_seconds, in_turns
from benchmarks.loras.subject import different, read_styles
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.stages.building import build_engine

_PX = 64
# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 900
_WARM_UP = 2
# steps of the same requests that are timed together
_NUM_NEXT = 3
_AIM_PERCENT, _AIM_BATCH, _AIM_WAY = 20.0, 8, "different, rank 16"
_BASE = "none"


def measure(study: Study) -> None:
    """Measure batches with different LoRAs."""
    study.found["what"] = (
        f"one engine step of {_PX} px with LoRAs over one without, no guidance, one thread, CPU "
        "time, in turns; first: the two steps after a change of the batch"
    )
    subject, batches = load_subject(), study.pick((1, 4, 8), (1, 4))
    sets = _sets(subject, max(batches))
    for batch in study.each(batches):
        ways = {name: _Steps(subject, own[:batch]) for name, own in sets.items()}
        with torch.inference_mode():
            in_turns(ways, _WARM_UP)
            for way in ways.values():
                way.first_s.clear()
                way.next_s.clear()
            in_turns(ways, study.pick(15, 2))
        for name, way in ways.items():
            over = paired_ratio(way.next_s, ways[_BASE].next_s)
            first = paired_ratio(way.first_s, ways[_BASE].first_s)
            columns = {"over_base": over, "ms_cpu": 1e3 * min(way.next_s), "first_over_base": first}
            study.row("steps with LoRAs", batch=batch, loras=name, **columns)
            if (batch, name) == (_AIM_BATCH, _AIM_WAY):
                what = f"step with {batch} LoRAs of rank 16 beyond one without"
                study.at_most(what, _AIM_PERCENT, scaled(over, 100, less=1), "%")
    study.plots.append(Plot("steps with LoRAs", "batch", ("over_base",), ("loras",)))


def _sets(subject: Subject, count: int) -> Mapping[str, Sequence[AdapterSet | None]]:
    """Return what each of so many requests has, by the name of the way."""
    styles = read_styles()

    def bound(*loras: LoraFactors) -> AdapterSet:
        return bind_adapters(subject.model, [(one, 1.0) for one in loras])

    same = [bound(styles["outline"])] * count
    ways: dict[str, Sequence[AdapterSet | None]] = {_BASE: [None] * count, "the same, rank 8": same}
    for style, rank in (("pastel", 4), ("outline", 8), ("texture", 16)):
        several = different(styles[style], count)
        ways[f"different, rank {rank}"] = [bound(one) for one in several]
    eight = different(styles["outline"], 2 * count)
    ways["two each, rank 8"] = [bound(*eight[2 * row : 2 * row + 2]) for row in range(count)]
    some = [different(one, count) for one in styles.values()]
    ways["different, ranks 4, 8 and 16"] = [bound(some[row % 3][row]) for row in range(count)]
    ways["half of the rows, rank 8"] = [
        ways["different, rank 8"][row] if row % 2 == 0 else None for row in range(count)
    ]
    return ways


class _Steps:
    """Steps of an engine that has a request for each of some sets: mean CPU seconds of one.

    Attributes:
        first_s: of the first two after steps of other requests.
        next_s: of those after them.
    """

    @torch.inference_mode()
    def __init__(self, subject: Subject, sets: Sequence[AdapterSet | None]) -> None:
        self._engine = build_engine(subject.model, max_batch=len(sets), clock=time.monotonic)
        requests = make_requests(len(sets), px=_PX, num_steps=_NUM_STEPS, guidance_scale=1.0)
        for state, own in zip(subject.start(requests), sets, strict=True):
            self._engine.add(state, None if own is None else own.denoiser)
        self.first_s: list[float] = []
        self.next_s: list[float] = []

    def __call__(self) -> None:
        self.first_s.append(cpu_seconds(self._engine.step, 2) / 2)
        self.next_s.append(cpu_seconds(self._engine.step, _NUM_NEXT) / _NUM_NEXT)
