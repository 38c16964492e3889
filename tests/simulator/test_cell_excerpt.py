"""What is shown of one simulation: who waits over time, and what replicas step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster.simulator.cell_excerpt import (
    SHOWN_S,
    Notes,
    excerpt_of,
    shown_runs,
    timeline_of,
    waiting_of,
    waiting_plot,
)
from ray_cluster.simulator.fates import Fate
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival
from tests.simulator.test_cell_experiment import small


def fate(at_s: float, end: str = "finished", end_s: float = 60.0) -> Fate:
    return Fate(Arrival(at_s, "m", 512, 512, 10), end, end_s)  # type: ignore[arg-type]


def test_who_waits_is_let_in_and_has_not_begun() -> None:
    # one begins at once, one after 30 s, one never, one is refused; the last comes at 60 s
    fates = [fate(0.0), fate(10.0), fate(10.0, "failed", 30.0), fate(5.0, "refused"), fate(60.0)]
    notes = Notes({"r": 2}, 30.0)
    runs = [
        StepRun(0.0, ("0",), (1.0,)),
        StepRun(40.0, ("0", "1"), (41.0,)),
        StepRun(60.0, ("4",), (61.0,)),
    ]
    for name, run in zip("rrq", runs, strict=True):
        notes(name, run)
    # neither what is over before the time that is shown, nor another replica's
    assert notes.shown == [("r", runs[1])]
    times_s, means = waiting_of(fates, notes.began_s)
    waiting = dict(zip(times_s, means, strict=True))
    assert [waiting[at_s] for at_s in (0.5, 9.5, 10.5, 29.5, 30.5, 39.5, 40.5, 59.5)] == (
        pytest.approx([0, 0, 2, 2, 1, 1, 0, 0])
    )
    assert sum(means) == pytest.approx(30 + 20)
    assert waiting_of([], {})[1] == (0.0,) * 60


def test_a_timeline_shows_batches_as_high_as_they_are_full() -> None:
    experiment = small(policies=["mixed-fcfs"], rates_per_s=[2, 9], duration_s=30)
    here = Path()
    excerpts = [excerpt_of(experiment, run, here) for run in shown_runs(experiment)]
    timeline = timeline_of(experiment, excerpts)
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
    plot = waiting_plot(experiment, excerpts)
    quiet, busy = plot.lines.values()
    assert list(plot.lines) == ["2 per second", "9 per second"]
    assert max(busy.y) > max(quiet.y) + 3


def test_the_busiest_two_minutes_are_shown() -> None:
    experiment = small(policies=["fcfs"], rates_per_s=[2], duration_s=2400, night=0.0)
    excerpt = excerpt_of(experiment, shown_runs(experiment)[0], Path())
    begin_s = min(bar.begin_s for bar in excerpt.bars)
    # neither night nor evening
    assert 700 < begin_s < 2000
    assert max(bar.end_s for bar in excerpt.bars) <= begin_s + SHOWN_S
    assert max(excerpt.times_s) < 2400


def test_of_many_replicas_and_sizes_some_are_shown() -> None:
    sizes = [{"width": 64 * number, "height": 512} for number in range(4, 14)]
    experiment = small(
        policies=["fcfs"], sizes=sizes, replicas=100, rates_per_s=[40], duration_s=20
    )
    excerpt = excerpt_of(experiment, shown_runs(experiment)[0], Path())
    assert len(excerpt.replicas) == 16
    assert (excerpt.replicas[0], excerpt.replicas[-1]) == ("pool-0", "pool-99")
    assert len(excerpt.sizes) == 8
    assert excerpt.sizes[-1] == "other sizes"
    assert {bar.label for bar in excerpt.bars} <= set(excerpt.sizes)
