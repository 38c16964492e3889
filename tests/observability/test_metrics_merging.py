"""Metrics of many processes as one: exact, and never falling."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from ray_cluster.api.access.call_metrics import GatewayMetrics
from ray_cluster.dispatch.reports.demand import DemandCounts
from ray_cluster.dispatch.reports.metrics import JobCounts, cell_snapshot
from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.dispatch.reports.statistics import OutcomeCounters
from ray_cluster.engine.groups.tally import Tally
from ray_cluster.engine.step.step_engine import StepReport
from ray_cluster.jobs.controller_metrics import plan_snapshot
from ray_cluster.observability.metrics_snapshot import MetricsBook, Snapshot, merge, render, take
from ray_cluster.protocol.controller import PlanReport, RoundRecord
from ray_cluster.replica.controlnet.metrics import ControlNetClientMetrics, ControlNetServerMetrics
from ray_cluster.replica.denoise.metrics import ReplicaMetrics, ScorerMetrics
from ray_cluster.replica.group.metrics import GroupMetrics
from ray_cluster.replica.lora_store.metrics import LoraMetrics


def values(snapshot: Snapshot) -> dict[str, float]:
    """Samples as a scraper reads them."""
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render(snapshot).decode())
        for sample in family.samples
    }


def gateway(**calls: int) -> GatewayMetrics:
    metrics = GatewayMetrics()
    for status, count in calls.items():
        for _ in range(count):
            metrics.answered(route="/a", method="GET", status=int(status[1:]), seconds=0.2)
    return metrics


def calls(status: int) -> str:
    labels = [("method", "GET"), ("route", "/a"), ("status", str(status))]
    return f"ray_cluster_http_requests_total{labels}"


def test_what_comes_out_is_what_went_in() -> None:
    registry = CollectorRegistry()
    awkward = 'a "b"\n\\'
    Counter("things", "Things.", ["kind"], registry=registry).labels(awkward).inc(2.5)
    Gauge("level", "Level.", registry=registry).set(-1)
    found = values(take(registry))
    assert found == {f"things_total{[('kind', awkward)]}": 2.5, "level[]": -1}


def test_counters_and_histograms_add_up() -> None:
    one, two = gateway(s200=3, s404=1), gateway(s200=4)
    found = values(merge([one.snapshot(), two.snapshot()]))
    assert found[calls(200)] == 7
    assert found[calls(404)] == 1
    assert found["ray_cluster_http_request_seconds_count[('route', '/a')]"] == 8
    assert found["ray_cluster_http_request_seconds_sum[('route', '/a')]"] == pytest.approx(1.6)
    assert found["ray_cluster_http_request_seconds_bucket[('le', '0.3'), ('route', '/a')]"] == 8
    assert found["ray_cluster_http_request_seconds_bucket[('le', '0.1'), ('route', '/a')]"] == 0
    # what was merged is not changed by it
    assert values(one.snapshot())[calls(200)] == 3


def test_the_counts_of_the_dead_stay_and_their_gauges_go() -> None:
    registry = CollectorRegistry()
    Gauge("level", "Level.", ["process"], registry=registry).labels("x").set(5)
    book = MetricsBook(silence_s=10.0)
    book.update("a", (*gateway(s200=3).snapshot(), *take(registry)), 0.0)
    book.update("b", gateway(s200=1).snapshot(), 5.0)
    assert values(book.merged(9.0))["level[('process', 'x')]"] == 5
    later = values(book.merged(12.0))
    assert later[calls(200)] == 4
    assert "level[('process', 'x')]" not in later


def test_one_that_was_only_silent_is_counted_once() -> None:
    book = MetricsBook(silence_s=10.0)
    book.update("a", gateway(s200=3).snapshot(), 0.0)
    assert values(book.merged(100.0))[calls(200)] == 3
    book.update("a", gateway(s200=5).snapshot(), 101.0)
    assert values(book.merged(101.0))[calls(200)] == 5


def test_many_dead_processes_take_little_room_and_lose_nothing() -> None:
    book = MetricsBook(silence_s=1.0)
    for index in range(500):
        book.update(f"p{index}", gateway(s200=1).snapshot(), float(10 * index))
        assert values(book.merged(10.0 * index))[calls(200)] == index + 1
    assert len(book._dead) + len(book._live) <= 201


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 20)), max_size=30)
)
def test_sums_never_fall(events: list[tuple[str, int, float]]) -> None:
    book, now_s, last = MetricsBook(silence_s=10.0), 0.0, 0.0
    counts = dict.fromkeys("abc", 0)
    for process, more, passed_s in events:
        now_s += passed_s
        counts[process] += more
        metrics = ReplicaMetrics("m", "r")
        for _ in range(counts[process]):
            metrics.stepped(StepReport(stepped=("a", "b"), duration_s=0.1))
        book.update(process, metrics.snapshot(), now_s)
        found = values(book.merged(now_s))["ray_cluster_step_seconds_count[('model', 'm')]"]
        assert found == sum(counts.values())
        assert found >= last
        last = found


def test_the_documentation_names_every_metric() -> None:
    cluster = ClusterSnapshot(
        num_waiting=0,
        num_leased=0,
        oldest_waiting_s=0.0,
        num_waiting_by_model={},
        replicas=(),
        counters=OutcomeCounters(),
        demand=DemandCounts(),
    )
    report = PlanReport(is_enabled=True, heard_s=0.0, latest=RoundRecord(0.0, 1, 0.1, "applied"))
    snapshots = [
        GatewayMetrics().snapshot(),
        ReplicaMetrics("m", "r").snapshot(),
        ScorerMetrics("judge").snapshot(),
        LoraMetrics("node").snapshot(0),
        ControlNetServerMetrics("edges").snapshot(),
        ControlNetClientMetrics().snapshot(),
        GroupMetrics("m").snapshot(Tally(), 0, 0.0),
        cell_snapshot(cluster, JobCounts()),
        plan_snapshot(report, 0.0),
    ]
    names = {
        family.name + ("_total" if family.kind == "counter" else "") for family in merge(snapshots)
    }
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(ray_cluster_\w+)`", page, re.MULTILINE))
    assert documented == names
