"""What is passed on of a process's metrics: each count once, each gauge as it is."""

from __future__ import annotations

from collections import Counter as OutcomeCounters

import hypothesis.strategies as st
from hypothesis import given
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ray_cluster.observability.metrics_changes import Change, Changes
from ray_cluster.observability.metrics_snapshot import Snapshot, take


def told(changes: list[Change]) -> dict[tuple[str, str], float]:
    return {(one.name, ",".join(f"{k}={v}" for k, v in one.labels)): one.value for one in changes}


def test_a_counter_is_told_as_what_came_on_top() -> None:
    registry = CollectorRegistry()
    counter = Counter("ray_cluster_things", "Things.", ["kind"], registry=registry)
    counter.labels("a").inc(2)
    counter.labels("b")
    changes = Changes()
    assert told(changes.since_last(take(registry))) == {("ray_cluster_things", "kind=a"): 2}
    assert changes.since_last(take(registry)) == []
    counter.labels("a").inc(3)
    counter.labels("b").inc()
    news = changes.since_last(take(registry))
    assert told(news) == {("ray_cluster_things", "kind=a"): 3, ("ray_cluster_things", "kind=b"): 1}
    assert {one.kind for one in news} == {"counter"}


def test_a_histogram_is_told_as_counts_that_only_grow() -> None:
    registry = CollectorRegistry()
    seconds = Histogram("s", "Seconds.", buckets=(0.1, 1.0), registry=registry)
    changes = Changes()
    changes.since_last(take(registry))
    seconds.observe(0.5)
    seconds.observe(7.0)
    assert told(changes.since_last(take(registry))) == {
        ("s_bucket", "le=1.0"): 1,
        ("s_bucket", "le=+Inf"): 2,
        ("s_count", ""): 2,
        ("s_sum", ""): 7.5,
    }


def test_a_gauge_that_is_gone_is_told_once_as_zero() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("level", "Level.", ["replica"], registry=registry)
    gauge.labels("x").set(5)
    gauge.labels("y").set(0)
    changes = Changes()
    present = {("level", "replica=x"): 5, ("level", "replica=y"): 0}
    assert told(changes.since_last(take(registry))) == present
    assert told(changes.since_last(take(registry))) == present
    gauge.remove("x")
    gone = {("level", "replica=x"): 0, ("level", "replica=y"): 0}
    assert told(changes.since_last(take(registry))) == gone
    assert told(changes.since_last(take(registry))) == {("level", "replica=y"): 0}


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=8))
def test_increments_add_up_to_the_count_however_often_it_is_told(rounds: list[list[str]]) -> None:
    registry = CollectorRegistry()
    counter = Counter("n", "N.", ["kind"], registry=registry)
    changes, sums = Changes(), OutcomeCounters[str]()
    for kinds in rounds:
        for kind in kinds:
            counter.labels(kind).inc()
        for one in changes.since_last(take(registry)):
            assert one.value > 0
            sums[dict(one.labels)["kind"]] += int(one.value)
    assert sums == OutcomeCounters(kind for kinds in rounds for kind in kinds)


def test_it_holds_nothing_of_a_snapshot_that_is_empty() -> None:
    empty: Snapshot = ()
    assert Changes().since_last(empty) == []
