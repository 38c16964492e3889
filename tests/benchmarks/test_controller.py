"""The controller's benchmark: the same day for all, and an audit that finds what goes wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.contenders import Counts, Site
from benchmarks.serving.controller import section
from benchmarks.serving.controller_audit import Ended, audit
from benchmarks.serving.controller_calls import Known
from benchmarks.serving.controller_comparison import (
    OURS,
    RIVALS,
    STATIC,
    Day,
    Live,
    core_seconds,
    mixed_prompts,
    row_of,
)
from benchmarks.serving.controller_plot import main as draw
from benchmarks.serving.controller_policies import SERVE, costs_of, ours
from benchmarks.serving.controller_reshapes import (
    Reshape,
    Reshaped,
    changes_by_dwell,
    planned_at,
)
from benchmarks.serving.controller_service import (
    CASCADE,
    HEAVY,
    LIGHT,
    ControlledContender,
    Service,
)
from benchmarks.serving.controller_simulated import simulate, simulate_all
from benchmarks.serving.controller_trace import (
    Answer,
    by_bin,
    gap,
    over_time,
    rights,
    squeezed_day,
    violations,
)
from benchmarks.serving.controller_watch import (
    DIFFSERVE,
    Round,
    SlotPlanner,
    curves_of,
    diffserve,
    in_slots,
)
from ray_cluster.config.loading import load_config
from ray_cluster.control.fleet import fleet_of, state_of
from ray_cluster.control.records import Glance
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.control import (
    ModelQueue,
    Observation,
    ObservedCascade,
    ObservedLimits,
    ObservedPool,
    ObservedReplica,
    TypicalRequest,
)

ROOT = Path(__file__).resolve().parents[2]
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


def answer(at_s: float, *, is_right: bool | None = True, is_late: bool = False) -> Answer:
    stage = None if is_right is None else "light"
    return Answer(at_s, "late" if is_late else "in time", stage, is_right)


def test_a_day_has_bursts_and_is_always_the_same() -> None:
    steady = squeezed_day(20.0, 20.0, 400.0, slo_s=2.0, num_prompts=30)
    gaps = np.diff(steady.instants_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.2, abs=0.05)
    assert steady == squeezed_day(20.0, 20.0, 400.0, slo_s=2.0, num_prompts=30)
    assert set(steady.prompts) == set(range(30))
    squeezed = squeezed_day(2.0, 20.0, 240.0, slo_s=2.0, num_prompts=30)
    per_hour = np.histogram(squeezed.instants_s, bins=24, range=(0, 240))[0]
    assert per_hour[10:20].mean() > 4 * per_hour[1:6].mean()
    assert len(squeezed.prompts) == len(squeezed.instants_s)


def test_figures_are_those_of_the_calls_that_arrived_in_a_bin() -> None:
    answers = [answer(1.0), answer(9.9, is_late=True), answer(10.0, is_right=False)]
    answers += [answer(35.0, is_right=None, is_late=True)]
    assert by_bin(answers, violations(answers), 40.0) == pytest.approx(
        [50.0, 0.0, math.nan, 100.0], nan_ok=True
    )
    rows = over_time({"a": answers, "b": [answer(1.0)]}, 40.0)
    assert [row["calls"] for row in rows] == [2, 1, 0, 1]
    assert rows[1]["a: all right, %"] == 0.0
    assert rows[3]["a: all right, %"] is None
    assert rows[3]["a: violations, %"] == 100.0
    assert rows[0]["b: violations, %"] == 0.0


def test_a_gap_is_of_the_same_calls_and_leaves_out_what_is_unknown() -> None:
    ours_, others = [1.0, 1.0, math.nan, 0.0] * 50, [1.0, 0.0, 0.0, 0.0] * 50
    found = gap(ours_, others)
    assert found.value == pytest.approx(100 * (2 / 3 - 1 / 4))
    assert found.low < found.value < found.high
    equal = gap(others, others)
    assert (equal.size, equal.size_interval) == (0.0, (0.0, 0.0))
    with pytest.raises(ValueError, match="same calls"):
        gap([1.0], [1.0, 0.0])


def pictures(*shades: int) -> list[Ended]:
    return [
        Ended(number, ("m", number % 2), np.full((4, 4, 3), shade, np.uint8))
        for number, shade in enumerate(shades)
    ]


def test_an_audit_accepts_calls_that_all_ended_once() -> None:
    # one unit of 255 is rounding
    assert audit(4, pictures(10, 99, 11, 99), Counts(4, 4, 0, 0)) == []


@pytest.mark.parametrize(
    ("num_sent", "ended", "counts", "said"),
    [
        (5, pictures(10, 99, 10, 99), Counts(4, 4, 0, 0), "1 of 5 calls never ended"),
        (4, pictures(10, 99, 10, 99), Counts(5, 4, 0, 0), "1 images were accepted and never"),
        (4, pictures(10, 99, 10, 99), Counts(5, 5, 0, 0), "completed 5 images, and clients got 4"),
        (2, pictures(10, 99) + pictures(10), Counts(3, 3, 0, 0), "the call 0 ended 2 times"),
        (4, pictures(10, 99, 12, 99), Counts(4, 4, 0, 0), "the image of call 2 is not the first"),
        (
            3,
            [*pictures(10, 99), Ended(2, ("m", 0), None, "503")],
            Counts(2, 2, 0, 0),
            "1 calls failed: 503",
        ),
    ],
)
def test_an_audit_finds_what_is_lost_failed_made_twice_or_another(
    num_sent: int, ended: Sequence[Ended], counts: Counts, said: str
) -> None:
    [problem] = audit(num_sent, ended, counts)
    assert said in problem


HISTORY: list[dict[str, Any]] = [
    {"at": 130.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
    {"at": 112.0, "took_s": 0.5, "actions": ["batch caps and thresholds"]},
    {"at": 111.0, "took_s": 0.5, "actions": [f"{HEAVY}: 2 to 1 replicas", f"{LIGHT}: 0 to 1"]},
    {"at": 90.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
]


def test_a_reshape_begins_with_the_first_round_that_plans_it() -> None:
    assert planned_at(HISTORY, HEAVY, 2, 100.0) == 129.5
    assert planned_at(HISTORY, HEAVY, 2, 80.0) == 89.5
    assert planned_at(HISTORY, HEAVY, 0, 80.0) is None
    # the light model's name begins with the heavy one's
    assert planned_at(HISTORY, LIGHT, 2, 80.0) is None
    assert Reshape("up", 100.0, 129.5, 140.0).took_s == 10.5
    assert Reshape("up", 100.0, None, 140.0).took_s is None


def test_changes_are_counted_by_dwell_time() -> None:
    assert changes_by_dwell(HISTORY, HEAVY, 100.0, 15.0, 3) == [1, 0, 1]
    assert changes_by_dwell(HISTORY, HEAVY, 85.0, 15.0, 1) == [1]


def test_core_seconds_are_those_reserved_during_the_trace() -> None:
    seen = observation()
    found = [
        Round(99.0, {HEAVY: 1, LIGHT: 1, JUDGE: 1}, 200, seen),
        Round(104.0, {HEAVY: 2, LIGHT: 1, JUDGE: 1}, 200, seen),
    ]
    assert core_seconds(found, 100.0, 110.0) == pytest.approx(1.0 * 4 + 1.5 * 6)
    assert core_seconds([], 100.0, 110.0) == 0.0


def test_another_policy_plans_in_replicas_and_keeps_the_discriminator() -> None:
    seen = observation(num_heavy=2)
    planned = fleet_of(seen, curves_of)
    state = state_of(seen, planned, supply={"cpu": 200}, targets={HEAVY: 2, LIGHT: 1, JUDGE: 1})
    assert in_slots(state, planned).devices[0].num_gpus == 3
    glance = Glance(seen, planned, state)
    planner = SlotPlanner(
        lambda: glance, lambda fleet: diffserve(fleet, {"smoothing": 0.5, "demand_factor": 1.05})
    )
    memory = planner.begin(state)
    plan, _ = planner.plan(replace(state, now_s=state.now_s + 2), memory)
    assert {one.pool: one.num_replicas for one in plan.pools} == {HEAVY: 2, LIGHT: 1, JUDGE: 1}


def test_costs_are_those_of_the_live_cell_with_what_replicas_reserve() -> None:
    costs = costs_of(rounds())
    assert (costs.supply, costs.num_slots) == (175, 3)
    assert [one.gpus_per_replica for one in costs.fleet.pools] == [50, 50]
    assert [one.model for one in costs.fleet.pools] == [LIGHT, HEAVY]
    assert costs.image_s(HEAVY) == pytest.approx(0.3, rel=0.01)
    [service] = costs.fleet.services
    assert service.cascade is not None
    assert (service.slo_s, service.cascade.num_scorers) == (2.0, 1)
    assert 0 < service.cascade.discriminate_s < 0.02
    with pytest.raises(ValueError, match="both models"):
        costs_of([])


def test_a_simulated_day_has_an_answer_for_every_call() -> None:
    one = day()
    run = simulate(costs_of(rounds()), ours(costs_of(rounds()), 0.5), one)
    assert [made.at_s for made in run.answers] == list(one.trace.instants_s)
    assert np.mean(violations(run.answers)) < 0.03
    assert {made.stage for made in run.answers} == {"light", "heavy"}
    assert 50 < run.core_s < 1.75 * 60 + 1


def live_day(one: Day) -> dict[str, Live]:
    """Return live runs that were as simulated ones of the same costs."""
    found = {}
    for name in RIVALS:
        run = simulate(costs_of(rounds()), ours(costs_of(rounds()), 0.5), one)
        seen = rounds(0.5 if name == STATIC else 1.0)
        cores = {"cores_by_role": {"model replica": 1.2}, "cores_of_others": 0.1}
        found[name] = Live(run.answers, seen, 1e9, one.trace.duration_s, cores)
    return found


def test_the_tables_have_every_policy_and_the_plot_is_drawn(tmp_path: Path) -> None:
    one = day(40.0)
    live = live_day(one)
    simulated = simulate_all(one, live, lambda _done, _what: None)
    assert {OURS, STATIC, DIFFSERVE, SERVE, "proteus", "all-heavy"} <= simulated.keys()
    reshapes = [Reshape("up", 0.0, 1.0, 9.0), Reshape("silent", 0.0, 2.0, 3.0)]
    found = section(Reshaped(reshapes, [1, 0], 30, []), one, live, simulated, 1.9)
    assert found["problems"] == []
    tables = found["tables"]
    assert [row["policy"] for row in tables["a day, live"]] == list(RIVALS)
    assert {row["policy"] for row in tables["the same day, simulated"]} == simulated.keys()
    [_, changes] = [aim for aim in found["aims"] if "dwell" in aim["name"] or "p50" in aim["name"]]
    assert changes["measured"] == 0.5
    # the live run of ours was made by the same simulation
    [same] = [aim for aim in found["aims"] if aim["name"].endswith("violations: ours")]
    assert (same["measured"], same["verdict"]) == (0.0, "yes")
    result = {
        "machine": {"cpu": "x"},
        "started": "2026-11-26T00:00:00",
        "commit": "none",
        "sections": {"controller": found},
    }
    path = tmp_path / "found.json"
    path.write_text(json.dumps(result))
    draw([str(path)])
    assert path.with_suffix(".png").is_file()


def test_a_run_whose_images_are_others_is_a_problem() -> None:
    one = day(20.0)
    live = live_day(one)
    wrong = [
        replace(made, is_right=not made.is_right) if made.is_right is not None else made
        for made in live[OURS].answers
    ]
    simulated = simulate_all(one, live, lambda _done, _what: None)
    live[OURS] = replace(live[OURS], answers=wrong)
    reshaped = Reshaped([Reshape("up", 0.0, None, None)], [0], 1, ["never done"])
    problems = section(reshaped, one, live, simulated, 2.0)["problems"]
    assert problems[0] == "never done"
    assert "are not those made beforehand" in problems[1]


def test_a_row_tells_late_from_refused() -> None:
    answers = [answer(0.0), answer(1.0, is_late=True), Answer(2.0, "refused")]
    row = row_of("x", answers)
    assert (row["calls"], row["late"], row["refused"], row["failed"]) == (3, 1, 1, 0)
    assert row["violations, %"].startswith("66.7")
    assert row["all right, %"].startswith("100.0")
    assert row["of calls right in time, %"].startswith("33.3")
    assert rights(answers)[:2] == [1.0, 1.0]


def test_services_differ_in_their_cascades_and_controllers_alone(tmp_path: Path) -> None:
    for name, rival in RIVALS.items():
        contender = ControlledContender(
            what=name, cascade=rival.cascade, control=rival.control, default_slo_s=2.5
        )
        config = load_config(contender.config(Site(tmp_path, tmp_path, "float32", {}), 18999))
        [cascade] = config.cascades
        assert config.control.enabled == (name != STATIC)
        assert cascade.threshold == (0.5 if name == STATIC else 1.0)
        assert cascade.reserve_s == (None if name == DIFFSERVE else 0.5)
        assert config.dispatch.default_slo_s == 2.5
        assert [one.replicas for one in config.pools] == [1, 1]


def test_live_settings_change_one_pool_and_the_controller(tmp_path: Path) -> None:
    contender = ControlledContender(what="", cascade=None, control={"dwell_s": 1.0})
    launch = contender.launch(Site(tmp_path, tmp_path, "float32", {}))
    service = Service(launch.url, contender.files[-1], "")
    service.tune({HEAVY: {"min_replicas": 2, "max_replicas": 2}}, dwell_s=15.0)
    config = load_config(service.file)
    heavy, light = config.pools
    assert (heavy.name, heavy.min_replicas, heavy.max_replicas) == (HEAVY, 2, 2)
    assert (light.min_replicas, light.max_replicas) == (1, None)
    assert config.control.dwell_s == 15.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_reshapes_and_compares(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", "controller"]
    done = subprocess.run(
        [*command, "--out", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["sections"]["controller"]
    assert found["problems"] == []
    tables = found["tables"]
    assert [row["policy"] for row in tables["a day, live"]] == list(RIVALS)
    assert all(row["done"] == row["count"] for row in tables["reshapes"] if "done" in row)
    assert all(row["failed"] == 0 for row in tables["a day, live"])
