"""What one engine step costs beyond the plain UNet call that it makes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.engine.subject import Subject, bare_inputs, load_subject, make_requests
from benchmarks.figures import paired_ratio, scaled
from benchmarks.harness import SCALES, Row, Study, in_turns
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.policies.steps.mixed_batching import mixed_batches

# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 500
_WARM_UP = 3
_AIM_PERCENT, _AIM_BATCH = 5.0, 8


class _TimedExecutor:
    """An executor that adds up the CPU seconds of its model calls; all else is the inner one's."""

    def __init__(self, inner: Any, spent_s: defaultdict[str, float]) -> None:
        self._inner = inner
        self.encode_half = _timed(inner.encode_half, spent_s, "executor")
        self.decode_half = _timed(inner.decode_half, spent_s, "executor")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _timed(
    function: Callable[..., Any], spent_s: defaultdict[str, float], name: str
) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        started_s = time.thread_time()
        result = function(*arguments, **more)
        spent_s[name] += time.thread_time() - started_s
        return result

    return call


def measure(study: Study) -> None:
    """Measure every batch with guidance off and on."""
    study.found["what"] = (
        "one engine step against a plain unet(x, t, embeds) call of the same rows (guidance rows "
        "included), 64 px, CPU time of the thread, in turns"
    )
    subject, batches = load_subject(), study.pick((1, 4, 8, 16), (1, 4))
    for scale, batch in study.each(product(SCALES, batches)):
        row = _step(subject, batch, scale, study.pick(40, 4))
        study.row("mean ms of a step, and of its parts", **row)
        if batch == _AIM_BATCH:
            name = f"step over bare UNet, batch {batch}, guidance {'on' if scale > 1 else 'off'}"
            study.at_most(name, _AIM_PERCENT, scaled(row["step_over_plain"], 100, less=1), "%")


@torch.inference_mode()
def _step(subject: Subject, batch: int, scale: float, rounds: int) -> Row:
    spent_s: defaultdict[str, float] = defaultdict(float)
    model = subject.model
    engine = build_engine(
        replace(model, executor=_TimedExecutor(model.executor, spent_s)),
        max_batch=batch,
        clock=time.monotonic,
        policy=_timed(mixed_batches, spent_s, "policy"),
    )
    requests = make_requests(batch, px=64, num_steps=_NUM_STEPS, guidance_scale=scale)
    states = subject.start(requests)
    for state in states:
        engine.add(state)
    unet, inputs = subject.pipeline.unet, bare_inputs(subject, states)
    ways = {"step": engine.step, "plain": lambda: unet(**inputs, return_dict=False)}
    in_turns(ways, _WARM_UP)
    spent_s.clear()
    costs = {name: [one.cpu_s for one in found] for name, found in in_turns(ways, rounds).items()}
    step_ms, plain_ms = (1e3 * sum(costs[name]) / rounds for name in ways)
    executor_ms, policy_ms = (1e3 * spent_s[name] / rounds for name in ("executor", "policy"))
    return {
        "batch": batch,
        "guidance": scale > 1,
        "step_over_plain": paired_ratio(costs["step"], costs["plain"]),
        "step": step_ms,
        "plain_call": plain_ms,
        "executor_beyond_it": executor_ms - plain_ms,
        "policy": policy_ms,
        "rows_sampler_and_checks": step_ms - executor_ms - policy_ms,
    }
