from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving.compare.experiment import missing_blocks
from benchmarks.serving.compare.prediction import Simulated, predict
from benchmarks.serving.compare.results import ComparedCell, ResultStore, SettingsDiffer
from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Trace, draw_traces
from ray_cluster.models.latency_profiles import save_profile
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey
from tests.benchmarks.comparing import ALONE_S, SETTINGS, traces


def gap_cv(trace: Trace) -> float:
    gaps = np.diff([one.arrival_s for one in trace.requests])
    return float(gaps.std() / gaps.mean())


def test_traces_are_the_same_every_time_and_more_begin_with_fewer() -> None:
    more = traces(replace(SETTINGS, num_traces=3))
    assert traces() == traces() == more[: len(traces())]
    assert len({one.requests for one in more}) == len(more)


def test_every_trace_has_as_many_requests_as_asked_for_at_about_the_rate() -> None:
    for trace in traces(replace(SETTINGS, num_requests=400, num_traces=1)):
        assert len(trace.requests) == 400
        assert 400 / trace.requests[-1].arrival_s == pytest.approx(2.0, rel=0.3)


def test_bursty_arrivals_have_twice_the_spread_of_poisson_ones() -> None:
    poisson, bursty = traces(replace(SETTINGS, num_requests=2000, num_traces=1))
    assert gap_cv(poisson) == pytest.approx(1.0, rel=0.15)
    assert gap_cv(bursty) == pytest.approx(2.0, rel=0.15)


def test_load_changes_the_pace_and_nothing_else() -> None:
    [trace, *_] = traces()
    for slow, fast in zip(trace.requests, trace.at(2.0).requests, strict=True):
        assert replace(fast, arrival_s=slow.arrival_s) == slow
        assert fast.arrival_s == pytest.approx(slow.arrival_s / 2)


def test_deadline_is_in_times_of_the_request_alone() -> None:
    requests = [one for trace in traces() for one in trace.requests]
    assert {one.shape for one in requests} == set(SETTINGS.shapes)
    assert all(one.slo_s == pytest.approx(5 * ALONE_S[one.shape.name]) for one in requests)
    seeds = [one.seed for one in requests]
    assert len(set(seeds)) == len(seeds)


def test_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    store, first = ResultStore(tmp_path, SETTINGS), ComparedCell("ours", 0.5, "poisson-0")
    store.add(first, {"attainment": 0.5})
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"contender": "ours", "load": 1.0, "tra')
    again = ResultStore(tmp_path, SETTINGS)
    assert first in again
    assert again[first]["attainment"] == 0.5
    second = ComparedCell("ours", 1.0, "poisson-0")
    assert second not in again
    again.add(second, {"attainment": 0.25})
    third = ResultStore(tmp_path, SETTINGS)
    assert third[first]["attainment"] == 0.5
    assert third[second]["attainment"] == 0.25


def test_folder_of_other_settings_is_refused_but_may_get_more(tmp_path: Path) -> None:
    ResultStore(tmp_path, SETTINGS)
    ResultStore(tmp_path, replace(SETTINGS, loads=(0.5, 2.0), num_traces=9, contenders=("ours",)))
    with pytest.raises(SettingsDiffer, match=r"num_requests 40, now 50"):
        ResultStore(tmp_path, replace(SETTINGS, num_requests=50))


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    settings = replace(SETTINGS, contenders=("one-by-one", "ours"))
    store = ResultStore(tmp_path, settings)
    blocks = missing_blocks(settings, traces(), store)
    cells = [cell for block in blocks for cell in block.cells]
    assert len(cells) == len(set(cells)) == 2 * 2 * len(traces())
    for cell in cells[:3]:
        store.add(cell, {})
    rest = missing_blocks(settings, traces(), store)
    assert [cell for block in rest for cell in block.cells] == cells[3:]
    # the second contender's first load has run: what is left of it is one block
    assert len(rest) == len(blocks) - 1
    assert all(block.seconds > 0 for block in rest)


def test_everyone_is_first_in_turn() -> None:
    settings = Settings(num_traces=5, num_requests=5, processes=("poisson",))
    alone_s = {shape.name: 1.0 for shape in settings.shapes}
    drawn = draw_traces(settings, ["a"], rate_per_s=1.0, alone_s=alone_s)
    blocks = missing_blocks(settings, drawn, set())
    firsts = [block.contender for block in blocks[:: len(settings.contenders)]]
    assert sorted(firsts) == sorted(settings.contenders)
    assert {block.cells[0].load for block in blocks} == set(settings.loads)


def write_profile(path: Path) -> None:
    rows = [
        LatencyRow(
            OperationKey("step", *size, batch=batch, uses_guidance=True),
            0.004 * batch * size[0] / 64,
            "measured",
            "a test of the benchmarks",
        )
        for size in SETTINGS.sizes
        for batch in (1, 8)
    ]
    save_profile(path, LatencyProfile("p", "shapes-sd", "cpu", tuple(rows)))


def test_prediction_replays_the_very_trace_on_the_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile-ours.yaml"
    write_profile(path)
    [trace, *_] = traces()
    simulated = Simulated("deadline/one-size", path, max_batch=8)
    slow, fast = predict(tmp_path, [trace], (0.1, 20.0), simulated)
    assert (slow.load, fast.load) == (0.1, 20.0)
    # no queue at a tenth of the pace; at twenty times of it hardly a request can be in time
    assert slow.attainment == 1.0
    assert fast.attainment < 0.6
