"""A stream of requests with 10, 20 and 30 steps: static batches cannot mix them, the engine can."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.engine.contenders import Contender, EngineContender, PipelineContender, Served
from benchmarks.engine.speed import TOLERANCE
from benchmarks.engine.subject import Subject, largest_difference, make_requests
from benchmarks.settings import GUIDANCE, Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import Cost, Stopwatch
from ray_cluster.engine.image_decoder import Pixels
from ray_cluster.requests import ImageRequest

IN_FLIGHT = 8
_STEPS = (10, 20, 30)
_KINDS = ("one by one", "static", "engine")


class MixedSteps:
    """Serves one closed-loop stream in three ways, in turns."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        pipeline, engine = PipelineContender(subject.pipeline), EngineContender(subject)
        self._contenders: dict[str, tuple[Contender, int]] = {
            "one by one": (pipeline, 1),
            "static": (pipeline, IN_FLIGHT),
            "engine": (engine, IN_FLIGHT),
        }
        self._settings = settings

    def run(self, report: Report) -> dict[str, Any]:
        """Measure with guidance off and on."""
        scales = (1.0, GUIDANCE)
        return {
            "what": f"{self._settings.mixed_requests} requests of {_STEPS} steps in random order, "
            f"64 px, at most {IN_FLIGHT} in flight (a closed loop), one thread",
            "in_flight": IN_FLIGHT,
            "streams": [
                self._stream(scale, report, index / len(scales))
                for index, scale in enumerate(scales)
            ],
        }

    def _stream(self, guidance_scale: float, report: Report, done: float) -> dict[str, Any]:
        requests = self._requests(guidance_scale)
        costs: dict[str, list[Cost]] = {kind: [] for kind in _KINDS}
        served: dict[str, Served] = {}
        for turn in range(self._settings.min_rounds):
            # the order turns round, so that a slow drift of the machine favours nobody
            for kind in _KINDS if turn % 2 == 0 else _KINDS[::-1]:
                report(done, f"mixed steps, guidance {guidance_scale}: {kind}")
                contender, in_flight = self._contenders[kind]
                with Stopwatch() as watch:
                    served[kind] = contender.serve(requests, in_flight)
                costs[kind].append(watch.cost.per(len(requests)))
        return {
            "guidance": guidance_scale > 1,
            "contenders": [_result(kind, costs, served, requests) for kind in _KINDS],
        }

    def _requests(self, guidance_scale: float) -> list[ImageRequest]:
        count = self._settings.mixed_requests
        steps = [_STEPS[index % len(_STEPS)] for index in range(count)]
        if self._settings.num_steps < _STEPS[0]:
            steps = [1 + step // 10 for step in steps]
        random.Random(7).shuffle(steps)
        return make_requests(count, px=64, num_steps=steps, guidance_scale=guidance_scale)


def _result(
    kind: str,
    costs: dict[str, list[Cost]],
    served: dict[str, Served],
    requests: list[ImageRequest],
) -> dict[str, Any]:
    reference: dict[str, Pixels] = served["one by one"].images
    difference = largest_difference(reference, served[kind].images)
    cpu = [cost.cpu_s for cost in costs[kind]]
    result = {
        "kind": kind,
        "images_equal": difference <= TOLERANCE,
        "max_difference_255": difference,
        "seconds_per_image_cpu": summarise(cpu).as_dict(),
        "mean_batch": statistics.mean(served[kind].model_batches),
        "mean_latency_cpu_s_by_steps": {
            str(steps): statistics.mean(
                served[kind].latency_s[r.request_id] for r in requests if r.num_steps == steps
            )
            for steps in sorted({request.num_steps for request in requests})
        },
    }
    if difference <= TOLERANCE:
        for other in _KINDS[:2]:
            ratio = paired_ratio([cost.cpu_s for cost in costs[other]], cpu)
            result[f"speed_up_over_{other.replace(' ', '_')}_cpu"] = ratio.as_dict()
    return result
