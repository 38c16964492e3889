"""What is shown of one simulation: the queue over time, and what replicas step."""

from __future__ import annotations

import pytest

from ray_cluster.simulator.cell.cell import Fate
from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.runs import run_cell
from ray_cluster.simulator.cell.views import SHOWN_S, CellView, ViewRecorder
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival
from tests.simulator.test_cell_experiment import reported, small


def view_of(experiment: CellExperiment) -> CellView:
    view = run_cell(experiment, next(iter(experiment.runs()))).view
    assert view is not None
    return view


def test_the_queue_holds_the_admitted_that_have_not_begun() -> None:
    # one begins at once, one after 40 s, one fails before it begins, one is refused; the last
    # arrives at 60 s
    ends = [
        (0.0, "finished", 60.0),
        (10.0, "finished", 60.0),
        (10.0, "failed", 30.0),
        (5.0, "refused", 5.0),
        (60.0, "finished", 61.0),
    ]
    arrivals = [Arrival(at_s, "m", 512, 512, 10) for at_s, _, _ in ends]
    fates = [
        Fate(arrival, end, end_s)  # type: ignore[arg-type]
        for arrival, (_, end, end_s) in zip(arrivals, ends, strict=True)
    ]
    recorder = ViewRecorder(arrivals, {"r": 2})
    recorder("r", StepRun(0.0, ("0",), (1.0,)))
    recorder("r", StepRun(40.0, ("0", "1"), (41.0,)))
    # a replica that is not shown
    recorder("q", StepRun(60.0, ("4",), (61.0,)))
    view = recorder.view(fates)
    assert [(one.begin_s, one.end_s, one.high) for one in view.bars] == [
        (0.0, 1.0, 0.5),
        (40.0, 41.0, 1.0),
    ]
    waiting = dict(zip(view.times_s, view.waiting, strict=True))
    assert [waiting[at_s] for at_s in (0.5, 9.5, 10.5, 29.5, 30.5, 39.5, 40.5, 59.5)] == (
        pytest.approx([0, 0, 2, 2, 1, 1, 0, 0])
    )
    assert sum(view.waiting) == pytest.approx(30 + 20)


def test_a_timeline_shows_batches_as_high_as_they_are_full() -> None:
    report = reported(small(policies=["mixed-fcfs"], rates_per_s=[2, 9], duration_s=30))
    timeline = report.timeline
    assert "mixed-fcfs, 9 per second, seed 0 (simulated)" in timeline.title
    assert list(timeline.rows) == ["pool-0", "pool-1"]
    assert list(timeline.labels) == ["512x512", "1024x1024"]
    batches: dict[tuple[int, float], list[float]] = {}
    for bar in timeline.bars:
        assert bar.begin_s < bar.end_s
        batches.setdefault((bar.row, bar.begin_s), []).append(bar.high - bar.low)
        # of six: no more than a full batch
        assert 6 * bar.high == pytest.approx(round(6 * bar.high))
        assert 0 <= bar.low < bar.high <= 1
    assert max(len(shares) for shares in batches.values()) == 2
    assert max(sum(shares) for shares in batches.values()) == pytest.approx(1)
    (lines,) = report.plots[2].panels.values()
    quiet, busy = lines.values()
    assert list(lines) == ["2 per second", "9 per second"]
    assert max(busy.y) > max(quiet.y) + 3


def test_the_busiest_two_minutes_are_shown() -> None:
    view = view_of(small(policies=["fcfs"], rates_per_s=[2], duration_s=2400, night=0.0))
    begin_s = min(bar.begin_s for bar in view.bars)
    # neither night nor evening
    assert 700 < begin_s < 2000
    assert max(bar.end_s for bar in view.bars) <= begin_s + SHOWN_S
    assert max(view.times_s) < 2400


def test_of_many_replicas_and_sizes_some_are_shown() -> None:
    sizes = [{"width": 64 * number, "height": 512} for number in range(4, 14)]
    view = view_of(
        small(policies=["fcfs"], sizes=sizes, replicas=100, rates_per_s=[40], duration_s=20)
    )
    assert len(view.replicas) == 16
    assert (view.replicas[0], view.replicas[-1]) == ("pool-0", "pool-99")
    assert len(view.sizes) == 8
    assert view.sizes[-1] == "other sizes"
    assert {bar.label for bar in view.bars} <= set(view.sizes)
