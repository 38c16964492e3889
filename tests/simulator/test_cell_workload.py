"""Requests of an experiment are drawn from its sizes over a day, or replayed from a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_cluster.errors import ConfigError
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.simulator.cell.experiment import CellExperiment, CellRun
from ray_cluster.simulator.cell.runs import Setting, run_cell
from ray_cluster.simulator.experiments import first_workload, load_experiment
from ray_cluster.simulator.traces import read_trace, write_trace
from ray_cluster.simulator.workload import Arrival
from tests.simulator.group_rules import sp_experiment
from tests.simulator.test_cell_experiment import SMALL, small, written

REPLAY: dict[str, Any] = {
    "kind": "cell",
    "name": "replay",
    "what": "A trace.",
    "profile": "sdxl-h100",
    "trace": "trace.csv",
    "replicas": 2,
    "max_batch": 6,
    "policies": ["deadline"],
}


def replay(**changes: Any) -> CellExperiment:
    return CellExperiment.model_validate({**REPLAY, **changes})


def trace_of(folder: Path, *requests: Arrival) -> Path:
    write_trace(folder / "trace.csv", requests)
    return folder


def test_a_day_goes_from_a_low_rate_at_night_to_the_given_one() -> None:
    day = small(night=0.1, duration_s=2400, rates_per_s=[20])
    hours = np.array([one.arrival_s / 100 for one in Setting.of(day).workload(20, 1)])
    night, noon = np.sum((hours > 3.5) & (hours < 4.5)), np.sum((hours > 13.5) & (hours < 14.5))
    assert noon / 100 == pytest.approx(20, rel=0.1)
    assert night / 100 == pytest.approx(2, rel=0.3)
    flat = small(night=1, duration_s=100, rates_per_s=[20])
    count = len(Setting.of(flat).workload(20, 1))
    assert count == len(Setting.of(small(duration_s=100, rates_per_s=[20])).workload(20, 1))


def test_a_size_says_what_is_different_and_has_the_rest_from_the_experiment() -> None:
    plain = {"width": 512, "height": 512}
    sizes = [
        plain,
        {**plain, "steps": 8, "guidance": False, "slo_s": 3, "priority": 7, "slo_class": "draft"},
        {**plain, "width": 768, "slo_times_alone": 2},
    ]
    setting = Setting.of(small(sizes=sizes, slo_times_alone=4, duration_s=60, fewest_steps=6))
    drawn = {one.slo_class: one for one in setting.workload(12, 0)}
    usual, draft, other = drawn["512x512"], drawn["draft"], drawn["768x512"]
    assert (usual.num_steps, usual.uses_guidance, usual.priority) == (20, True, 0)
    assert (draft.num_steps, draft.uses_guidance, draft.priority) == (8, False, 7)
    cost = setting.pools[0].cost
    alone_s = [20 * step_s(cost, work_of([example])) for example in setting.examples]
    assert usual.slo_s == pytest.approx(4 * alone_s[0])
    assert draft.slo_s == 3
    assert other.slo_s == pytest.approx(2 * alone_s[2])
    assert {one.fewest_steps for one in drawn.values()} == {6}
    seconds = Setting.of(small(sizes=sizes, slo_s=9, duration_s=60)).workload(12, 0)
    found = {one.slo_class: one.slo_s for one in seconds}
    assert (found["512x512"], found["draft"]) == (9, 3)
    assert found["768x512"] == pytest.approx(other.slo_s)


def test_one_size_with_several_steps_is_a_mix_of_steps() -> None:
    size = {"width": 512, "height": 512}
    experiment = small(sizes=[{**size, "share": 3}, {**size, "steps": 5}], duration_s=200)
    steps = [one.num_steps for one in Setting.of(experiment).workload(10, 0)]
    assert steps.count(5) / len(steps) == pytest.approx(0.25, abs=0.04)
    assert set(steps) == {5, 20}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_trace_that_an_experiment_wrote_gives_the_same_simulation(
    tmp_path: Path, suffix: str
) -> None:
    drawn = {**SMALL, "rates_per_s": [6], "add_ons": "service-b", "fewest_steps": 15}
    workload = first_workload(written(tmp_path, drawn))
    assert {one.model for one in workload} == {"sdxl"}
    write_trace(tmp_path / f"t.{suffix}", workload)
    experiment = replay(trace=f"t.{suffix}")
    replayed = run_cell(experiment, CellRun("deadline", 1.0, 0), tmp_path)
    original = run_cell(CellExperiment.model_validate(drawn), CellRun("deadline", 6.0, 0))
    assert replayed.met == original.met
    assert replayed.admitted == original.admitted
    assert replayed.by_class == original.by_class
    assert "0" in original.met


def test_a_replay_is_faster_and_keeps_deadlines(tmp_path: Path) -> None:
    requests = [
        Arrival(10.0 * n, "m", 512, 512, 10, slo_s=5.0, slo_class="a", priority=n) for n in range(4)
    ]
    setting = Setting.of(replay(speeds=[1, 4]), trace_of(tmp_path, *requests))
    slow, fast = setting.workload(1, 0), setting.workload(4, 0)
    assert [one.arrival_s for one in slow] == [0, 10, 20, 30]
    assert [one.arrival_s for one in fast] == [0, 2.5, 5, 7.5]
    assert {one.slo_s for one in (*slow, *fast)} == {5.0}
    assert [one.priority for one in fast] == [0, 1, 2, 3]


def test_requests_of_a_trace_without_deadlines_have_the_experiments(tmp_path: Path) -> None:
    request = Arrival(0.0, "m", 512, 512, 10)
    folder = trace_of(tmp_path, request, Arrival(1.0, "m", 512, 512, 10, slo_s=2.0))
    alone = Setting.of(replay(slo_times_alone=3), folder)
    first, second = alone.workload(1, 0)
    assert first.slo_s == pytest.approx(3 * alone.alone_s(alone.examples[0]))
    assert second.slo_s == 2.0
    assert Setting.of(replay(slo_s=7), folder).workload(1, 0)[0].slo_s == 7


def test_of_a_trace_of_several_models_one_is_named(tmp_path: Path) -> None:
    folder = trace_of(
        tmp_path, *(Arrival(float(n), "ab"[n % 2], 512, 512, 10 + n % 2) for n in range(5))
    )
    found = Setting.of(replay(model="b"), folder).workload(1, 0)
    assert [one.arrival_s for one in found] == [1, 3]
    for model in (None, "c"):
        with pytest.raises(ConfigError, match=rf"model: given {model!r}; the trace .* has a, b"):
            Setting.of(replay(model=model), folder)


def test_the_report_says_what_is_replayed(tmp_path: Path) -> None:
    whole = [Arrival(5.0 * n, "m", 512, 512, 10) for n in range(5)]
    edit = Arrival(7.0, "m", 512, 512, 10, mask_ratio=0.2, template="t")
    words = Setting.of(replay(), trace_of(tmp_path, *whole, edit)).source.words
    assert words == (
        "6 requests in 20 s of trace.csv, 0.3 per second at speed 1, 1 of them edits, made as "
        "whole images"
    )
    lonely = Setting.of(replay(), trace_of(tmp_path, whole[0])).source.words
    assert lonely == "1 requests in 0 s of trace.csv"


def test_pictures_count_in_the_costliest_request_of_a_size(tmp_path: Path) -> None:
    plain = Arrival(0.0, "m", 512, 512, 10)
    looking = replace(plain, reference_px=1 << 20)
    source = Setting.of(replay(), trace_of(tmp_path, looking, plain)).source
    assert [one.reference_px for one in source.examples] == [1 << 20]


def test_what_nothing_is_drawn_for_runs_once(tmp_path: Path) -> None:
    trace_of(tmp_path, Arrival(0.0, "m", 512, 512, 10), Arrival(3.0, "m", 768, 512, 10))
    job = load_experiment(written(tmp_path, {**REPLAY, "speeds": [1, 2]}))
    assert len(job.parts) == 2
    report = job.sum_up([part() for part in job.parts])
    assert "one run, as nothing is drawn" in report.what
    assert [cell["speed"] for cell in report.figures["cells"]] == [1, 2]
    assert report.plots[0].x_label == "speed of the replay"
    # devices with noise differ from seed to seed
    noisy = load_experiment(written(tmp_path, {**REPLAY, "step_noise": 0.1, "num_seeds": 3}))
    assert len(noisy.parts) == 3


@pytest.mark.parametrize(
    ("trace", "message"),
    [("none.csv", "cannot read the trace"), ("trace.txt", "ends in .csv or .jsonl")],
)
def test_a_trace_that_cannot_be_read_is_said_before_anything_runs(
    tmp_path: Path, trace: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, {**REPLAY, "trace": trace}))


def test_the_trace_that_comes_along_is_what_its_experiment_draws() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "policies"
    assert read_trace(folder / "trace-replay.csv") == first_workload(folder / "day-of-images.yaml")


def test_traces_are_written_of_cells_only(tmp_path: Path) -> None:
    groups = sp_experiment().model_dump(mode="json")
    with pytest.raises(ConfigError, match="kind: given sequence-parallel; only experiments of"):
        first_workload(written(tmp_path, groups))
    with pytest.raises(ConfigError, match="has no steps on one device"):
        first_workload(written(tmp_path, {**SMALL, "profile": "flux-h100-a"}))
