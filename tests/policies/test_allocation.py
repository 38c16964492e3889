"""Allocations are the best there are: by enumeration, by published optima, and in time."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ray_cluster.policies.allocation.allocation import allocate
from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
    Supply,
)
from ray_cluster.policies.cascade import QualityCurve
from tests.policies.allocation_oracle import best_by_trying, value_of
from tests.policies.cascades import (
    DEFERRALS,
    FID,
    MORE_IS_BETTER,
    cascade_problem,
)
from tests.policies.problems import draw_problem

# seconds and rates without remainders, so that enumeration and program count alike
RATES = st.sampled_from([1.0, 2.0, 4.0, 5.0])
CURVES = st.sampled_from(
    [
        QualityCurve((0.0, 0.5, 1.0), (10.0, 5.0, 7.0)),
        QualityCurve((0.0, 0.5, 1.0), (0.0, 0.2, 1.0), lower_is_better=False),
        QualityCurve((0.0, 0.3, 0.6, 1.0), (9.0, 10.0, 4.0, 5.0)),
    ]
)
halves = st.integers(0, 12).map(lambda number: number / 2)


@st.composite
def options(draw: st.DrawFn) -> tuple[BatchOption, ...]:
    batches = draw(st.sampled_from([(1,), (1, 4), (2, 8)]))
    return tuple(BatchOption(one, one / draw(RATES)) for one in batches)


@st.composite
def pools(draw: st.DrawFn, name: str, model: str, devices: int, most: int) -> Pool:
    num_replicas = draw(st.integers(0, most))
    return Pool(
        name,
        model,
        draw(st.sampled_from(["a", "b"][:devices])),
        draw(options()),
        gpus_per_replica=draw(st.sampled_from([1, 1, 2])),
        num_replicas=num_replicas,
        num_young=draw(st.integers(0, num_replicas)) if draw(st.booleans()) else 0,
        lost_share=draw(st.sampled_from([0.0, 0.5])),
        max_replicas=draw(st.sampled_from([None, 2])),
        min_replicas=draw(st.sampled_from([0, 0, 1])),
    )


@st.composite
def cascades(draw: st.DrawFn) -> Service:
    demand = draw(halves)
    return Service(
        "cascade",
        slo_s=draw(st.sampled_from([2.0, 4.0, 8.0])),
        demand_per_s=demand,
        first=Stage("light", draw(st.sampled_from([0, 0, 0, 5, 30]))),
        surge_per_s=demand * draw(st.sampled_from([1.0, 1.5, 2.0])),
        heavy=Stage("heavy", draw(st.sampled_from([0, 0, 0, 5, 30]))),
        quality=draw(CURVES),
        direct_per_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
        alone_per_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
        weight=draw(st.integers(1, 2)),
    )


@st.composite
def alone(draw: st.DrawFn) -> Service:
    demand = draw(halves)
    return Service(
        "alone",
        slo_s=draw(st.sampled_from([1.0, 2.0, 4.0])),
        demand_per_s=demand,
        first=Stage("third", draw(st.sampled_from([0, 9]))),
        surge_per_s=demand * draw(st.sampled_from([1.0, 2.0])),
    )


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    devices = draw(st.integers(1, 2))
    supplies = [
        Supply(name, draw(st.integers(0, 6)), draw(st.integers(0, 5))) for name in "ab"[:devices]
    ]
    services, wanted = [draw(cascades())], [("one", "light"), ("two", "heavy")]
    match draw(st.integers(0, 2)):
        case 1:
            services.append(draw(alone()))
            wanted.append(("three", "third"))
        case 2:
            wanted.append(("three", "heavy"))
    return AllocationProblem(
        tuple(supplies),
        tuple(draw(pools(name, model, devices, 3)) for name, model in wanted),
        tuple(services),
        drain_s=draw(st.sampled_from([2.0, 10.0])),
        gain_per_start=draw(st.sampled_from([0, 50])),
    )


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(problems())
def test_it_is_as_good_as_the_best_of_everything_that_can_be_tried(
    problem: AllocationProblem,
) -> None:
    best = best_by_trying(problem)
    plan = allocate(problem, search_limit=10.0)
    if plan.infeasible is not None and "min_replicas" in plan.infeasible:
        assert best_by_trying(problem, unserved_allowed=True) is None
        return
    assert plan.is_proven
    assert (plan.infeasible is None) == (best is not None)
    counts = tuple(one.num_replicas for one in plan.sizes)
    if best is None:
        best = best_by_trying(problem, unserved_allowed=True)
        assume(best is not None)
        assert value_of(problem, counts, unserved_allowed=True) == best.value
    else:
        assert value_of(problem, counts) == best.value


@pytest.mark.parametrize(
    ("demand", "threshold", "rate"),
    [
        (16, 0.485, 0.964),
        (20, 0.26, 0.722),
        (24, 0.215, 0.602),
        (28, 0.15, 0.514),
        (32, 0.1, 0.449),
    ],
)
def test_it_finds_the_published_optima_of_a_cascade(
    demand: float, threshold: float, rate: float
) -> None:
    plan = allocate(cascade_problem(1.05 * demand, quality=MORE_IS_BETTER))
    found = plan.deferral_rate("images")
    # the highest of the thresholds, which go in steps of 0.005, that defers no more
    steps = [number * 0.005 for number in range(201)]
    highest = max(one for one in steps if DEFERRALS.rate_at(one) <= found)
    assert highest == pytest.approx(threshold)
    assert DEFERRALS.rate_at(highest) == pytest.approx(rate)
    assert sum(one.num_replicas for one in plan.sizes) == 16


def test_more_is_not_deferred_than_makes_images_better() -> None:
    plan = allocate(cascade_problem(5.0))
    assert plan.deferral_rate("images") == FID.best_rate == 0.6


def test_a_queue_takes_capacity_from_deferral() -> None:
    calm, queued = (allocate(cascade_problem(28.0, num_waiting=(0, number))) for number in (0, 60))
    assert calm.infeasible is queued.infeasible is None
    assert queued.deferral_rate("images") < calm.deferral_rate("images") - 0.1


def test_a_queue_that_cannot_drain_is_infeasible_and_says_where() -> None:
    plan = allocate(cascade_problem(28.0, num_waiting=(6000, 0)))
    assert plan.infeasible is not None
    assert "sd-turbo of images lacks capacity for" in plan.infeasible
    # the best effort puts every GPU where the lack is
    assert plan.size("light").num_replicas == 16


def test_a_deadline_no_batch_keeps_is_infeasible() -> None:
    plan = allocate(cascade_problem(1.0, slo_s=0.05))
    assert plan.infeasible == "the shortest batches of images take longer than its deadline"
    assert plan.size("light").num_replicas >= 1


def test_a_deadline_that_the_heavy_model_misses_leaves_the_light_one() -> None:
    plan = allocate(cascade_problem(10.0, slo_s=1.0))
    assert plan.infeasible is None
    assert plan.deferral_rate("images") == 0


@pytest.mark.parametrize(("lost_share", "num_heavy"), [(0.0, 14), (1.0, 13)])
def test_a_swap_is_made_only_if_the_replica_serves_long_enough(
    lost_share: float, num_heavy: int
) -> None:
    problem = cascade_problem(30.0, num_light=3, num_heavy=13, lost_share=lost_share)
    assert allocate(problem).size("heavy").num_replicas == num_heavy


def test_a_plan_is_not_left_for_less_than_a_start_must_bring() -> None:
    problem = cascade_problem(30.0, num_light=3, num_heavy=13)
    scores = [FID.score_at(rate * 1.087 / 30) for rate in (13, 14)]
    gains = [(FID.scores[0] - one) / max(FID.gains) for one in scores]
    worth = round(1000 * (gains[1] - gains[0]))
    for penalty, num_heavy in ((worth - 5, 14), (worth + 5, 13)):
        plan = allocate(replace(problem, gain_per_start=penalty))
        assert plan.size("heavy").num_replicas == num_heavy


def test_replicas_that_have_just_come_stay() -> None:
    problem = cascade_problem(30.0)
    light, heavy = problem.pools
    young = replace(problem, pools=(replace(light, num_replicas=5, num_young=5), heavy))
    assert allocate(young).size("light").num_replicas == 5
    # unless demand could not be met otherwise
    pressed = replace(young.services[0], direct_per_s=16.0, demand_per_s=1.0)
    plan = allocate(replace(young, services=(pressed,)))
    assert plan.infeasible is not None
    assert plan.size("heavy").num_replicas == 15


def test_money_is_spent_on_quality_and_on_surges_but_on_nothing_else() -> None:
    alone = Service("edits", 8.0, 5.0, Stage("sd-1.5"))
    pool = cascade_problem(1.0).pools[1]
    for surge, num_gpus in ((5.0, 5), (8.0, 7), (99.0, 16)):
        problem = AllocationProblem(
            (Supply("A100", 16, 3),), (pool,), (replace(alone, surge_per_s=surge),)
        )
        # 8 images take 6.79 s
        assert allocate(problem).size("heavy").num_replicas == num_gpus


def test_cheaper_gpus_are_taken_first_and_dearer_ones_where_they_are_too_slow() -> None:
    fast = Pool("fast", "m", "H100", (BatchOption(1, 1.0),))
    slow = Pool("slow", "m", "L4", (BatchOption(1, 3.0),))
    supplies = (Supply("H100", 4, 10), Supply("L4", 8, 2))
    service = Service("s", 5.0, 3.0, Stage("m"))
    plan = allocate(AllocationProblem(supplies, (fast, slow), (service,)))
    assert [one.num_replicas for one in plan.sizes] == [1, 6]
    hurried = replace(service, slo_s=2.0)
    plan = allocate(AllocationProblem(supplies, (fast, slow), (hurried,)))
    assert [one.num_replicas for one in plan.sizes] == [3, 0]


def test_what_cannot_be_meant_is_refused() -> None:
    problem = cascade_problem(1.0)
    with pytest.raises(ValueError, match="given twice"):
        replace(problem, pools=problem.pools * 2)
    with pytest.raises(ValueError, match="there are none of"):
        replace(problem, supplies=(Supply("H100", 1),))
    with pytest.raises(ValueError, match="no pool has"):
        replace(problem, pools=problem.pools[:1])
    with pytest.raises(ValueError, match="quality"):
        replace(problem.services[0], quality=None)


def test_equal_problems_give_equal_plans() -> None:
    problem = draw_problem(7)
    assert allocate(problem) == allocate(problem)


def test_a_thousand_gpus_and_twenty_pools_are_planned_and_mostly_proven_best() -> None:
    problems = [draw_problem(seed) for seed in range(12)]
    num_proven = 0
    for problem in problems:
        assert len(problem.pools) == 20
        assert sum(one.num_gpus for one in problem.supplies) == 1024
        num_proven += allocate(problem).is_proven
    assert num_proven >= 10


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_is_cut_short_still_gives_a_plan_and_says_so(seed: int) -> None:
    problem = draw_problem(seed, load=2.0)
    cut = allocate(problem, search_limit=1e-6)
    assert not cut.is_proven
    for supply in problem.supplies:
        used = [
            cut.size(pool.name).num_replicas
            for pool in problem.pools
            if pool.device == supply.device
        ]
        assert sum(used) <= max(
            supply.num_gpus,
            sum(pool.num_replicas for pool in problem.pools if pool.device == supply.device),
        )
