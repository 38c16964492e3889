"""Several devices, failures and slow messages, as an experiment's file says them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.models.latency_profiles import load_profile, save_profile
from ray_cluster.policies.costs.cost_fit import fit_step_cost, row_work
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.costs.latency import LatencyRow, OperationKey, SizeCount
from ray_cluster.simulator.cell.experiment import CellExperiment, CellRun
from ray_cluster.simulator.cell.runs import Setting, run_cell, simulate_cell
from ray_cluster.simulator.replica import StepRun
from tests.fakes import request_view
from tests.simulator.test_cell_experiment import pools, small

RUN = CellRun("deadline/one-size", 4.0, 0)


def of(**changes: Any) -> CellExperiment:
    given = {"policies": ["deadline/one-size"], "rates_per_s": [4], "duration_s": 60}
    return small(**given, **changes)


def test_a_list_of_one_pool_is_what_the_short_form_is() -> None:
    listed = pools({"profile": "sdxl-h100", "replicas": 2, "max_batch": 6})
    long = CellExperiment.model_validate({**listed, "policies": ["fcfs"]})
    short = small(policies=["fcfs"])
    for load in short.loads:
        run = CellRun("fcfs", load, 1)
        assert run_cell(long, run).figures == run_cell(short, run).figures


def made_by(setting: Setting, run: CellRun) -> Counter[str]:
    """How many requests each pool stepped."""
    pool_by_request: dict[str, str] = {}

    def watch(name: str, steps: StepRun) -> None:
        pool_by_request.update(dict.fromkeys(steps.request_ids, name.rsplit("-", 1)[0]))

    simulate_cell(setting, run, watch)
    return Counter(pool_by_request.values())


def test_fast_devices_make_more_and_none_of_a_sort_is_left_out() -> None:
    experiment = CellExperiment.model_validate(
        {
            **pools(
                {"profile": "sdxl-h100", "replicas": 2},
                {"profile": "sdxl-h100", "replicas": 2, "times": 3},
            ),
            "duration_s": 60,
        }
    )
    setting = Setting.of(experiment)
    assert [pool.name for pool in setting.pools] == ["sdxl-h100", "sdxl-h100/2"]
    fast, slow = (pool.cost for pool in setting.pools)
    assert slow.fixed_s == pytest.approx(3 * fast.fixed_s)
    for policy in ("deadline", "deadline/one-size"):
        made = made_by(setting, CellRun(policy, 6.0, 0))
        assert made["sdxl-h100"] > 1.5 * made["sdxl-h100/2"] > 0


def test_failures_and_slow_messages_cost_deadlines_and_come_as_the_seed_says() -> None:
    safe, failing = run_cell(of(), RUN), of(mtbf_s=30, repair_s=10, load_s=20)
    row = run_cell(failing, RUN)
    assert row == run_cell(failing, RUN)
    assert row.figures["attainment"] < safe.figures["attainment"]
    tight = {"slo_times_alone": 1.2, "rates_per_s": [0.2], "duration_s": 100}
    near, far = (
        run_cell(small(one_way_s=way_s, **tight), CellRun("deadline/open", 0.2, 0))
        for way_s in (0.0, 0.5)
    )
    assert far.figures["attainment"] < near.figures["attainment"]


def test_replicas_load_as_long_as_the_file_or_else_the_profile_says(tmp_path: Path) -> None:
    def load_s(experiment: CellExperiment) -> float:
        return Setting.of(experiment).spec("fcfs", 0, []).pools[0].hardware.load_s

    assert load_s(of(mtbf_s=100, load_s=7)) == 7
    assert load_s(of(mtbf_s=100)) == 0
    load = LatencyRow(OperationKey("load"), 41.0, "modelled", "for a test of load times")
    slow = written(tmp_path, load)
    assert load_s(of(mtbf_s=100, profile=slow)) == 41


def written(folder: Path, *more: LatencyRow) -> str:
    """A file with the package's profile of SDXL and more rows; its path."""
    shipped, path = load_profile("sdxl-h100"), folder / "more.yaml"
    save_profile(path, replace(shipped, rows=(*shipped.rows, *more)))
    return str(path)


def extra_s(profile: str, run: CellRun) -> dict[int, list[float]]:
    """By number of sizes: what steps take more than the package's profile says of their pixels."""
    setting = Setting.of(of(profile=profile, replicas=1))
    arrivals = setting.workload(run.load, run.seed)
    cost = fit_step_cost(load_profile("sdxl-h100")).cost
    found: dict[int, list[float]] = {}

    def watch(_name: str, steps: StepRun) -> None:
        batch = [arrivals[int(request_id)] for request_id in steps.request_ids]
        work = work_of(
            request_view(width_px=one.width_px, height_px=one.height_px, uses_guidance=True)
            for one in batch
        )
        took_s = steps.ends_s[0] - steps.start_s
        found.setdefault(work.num_sizes, []).append(took_s - step_s(cost, work))

    simulate_cell(setting, run, watch)
    return found


def test_replicas_pay_for_further_sizes_what_their_profile_measured(tmp_path: Path) -> None:
    cost, rows = fit_step_cost(load_profile("sdxl-h100")).cost, []
    for sides in ((512, 1024), (512, 768, 1024)):
        key = OperationKey("step", uses_guidance=True)
        key = key.of_sizes(SizeCount(side, side, 2) for side in sides)
        row = LatencyRow(key, 1.0, "modelled", "for a test of further sizes")
        further = replace(cost, per_further_size_s=0.02)
        rows.append(replace(row, seconds=step_s(further, row_work(row))))
    run = CellRun("deadline", 6.0, 0)
    for profile, further_s in (("sdxl-h100", 0.0), (written(tmp_path, *rows), 0.02)):
        found = extra_s(profile, run)
        assert found[1] == pytest.approx([0.0] * len(found[1]), abs=1e-6)
        assert found[2] == pytest.approx([further_s] * len(found[2]), abs=1e-6)
        assert len(found[2]) > 20
