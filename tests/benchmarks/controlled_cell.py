"""A cell with a cascade as the controller's benchmark sees it, and days of calls for it."""

from __future__ import annotations

from benchmarks.serving.controller_calls import Known
from benchmarks.serving.controller_comparison import (
    RIVALS,
    STATIC,
    Day,
    Live,
    mixed_prompts,
)
from benchmarks.serving.controller_policies import costs_of, ours
from benchmarks.serving.controller_service import CASCADE, HEAVY, LIGHT
from benchmarks.serving.controller_simulated import simulate
from benchmarks.serving.controller_trace import squeezed_day
from benchmarks.serving.controller_watch import Round
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.controller import (
    ModelQueue,
    Observation,
    ObservedCascade,
    ObservedLimits,
    ObservedPool,
    ObservedReplica,
    TypicalRequest,
)

JUDGE = "shapes-judge"


def observed_pool(name: str, num_steps: int, step_s: float, num_replicas: int) -> ObservedPool:
    cost = StepCost(fixed_s=step_s, per_megapixel_s=1.0)
    is_judge = name == JUDGE
    return ObservedPool(
        pool=name,
        kind="score" if is_judge else "denoise",
        serves=name,
        device="cpu",
        num_cpus=0.25 if is_judge else 0.5,
        num_gpus=0.0,
        load_s=3.0,
        step_cost=cost,
        typical=None if is_judge else TypicalRequest(64, 64, num_steps, uses_guidance=False),
        max_batch=8,
        replicas=tuple(
            ObservedReplica(f"{name}-{number}", 100.0, 0, 8, cost) for number in range(num_replicas)
        ),
    )


def observation(threshold: float = 1.0, num_heavy: int = 1) -> Observation:
    """Return a cell whose heavy images take 0.3 s and light ones a tenth of that."""
    cascade = ObservedCascade(
        CASCADE,
        LIGHT,
        HEAVY,
        JUDGE,
        curves="shapes-discriminator",
        threshold=threshold,
        deferral_rate=None,
        reserve_s=0.5,
    )
    return Observation(
        now_s=1e9,
        started_s=1e9,
        default_slo_s=2.0,
        services=(),
        models=(ModelQueue(LIGHT), ModelQueue(HEAVY)),
        pools=(
            observed_pool(HEAVY, 20, 0.011, num_heavy),
            observed_pool(LIGHT, 2, 0.011, 1),
            observed_pool(JUDGE, 1, 0.005, 1),
        ),
        cascades=(cascade,),
        limits=ObservedLimits(2.0, 15.0, 4, 180.0, dry_run=False),
    )


def rounds(threshold: float = 1.0) -> list[Round]:
    targets = {HEAVY: 1, LIGHT: 1, JUDGE: 1}
    return [Round(1e9 + at_s, targets, 200, observation(threshold)) for at_s in (0.0, 2.0, 4.0)]


def day(duration_s: float = 60.0, high_per_s: float = 9.0) -> Day:
    prompts = mixed_prompts(20)
    trace = squeezed_day(0.5, high_per_s, duration_s, slo_s=2.0, num_prompts=len(prompts))
    known = [Known(number / 20, number >= 8, True) for number in range(20)]
    return Day(trace, prompts, known, 3.3, 0.4)


def live_day(one: Day) -> dict[str, Live]:
    """Return live runs that were as simulated ones of the same costs."""
    found = {}
    for name in RIVALS:
        run = simulate(costs_of(rounds()), ours(costs_of(rounds()), 0.5), one)
        seen = rounds(0.5 if name == STATIC else 1.0)
        cores = {"cores_by_role": {"model replica": 1.2}, "cores_of_others": 0.1}
        found[name] = Live(run.answers, seen, 1e9, one.trace.duration_s, cores)
    return found
