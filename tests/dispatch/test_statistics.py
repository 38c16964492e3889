"""Ends are counted by class, and predictions by how far off they were."""

from __future__ import annotations

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.reports.metrics import JobCounts, cell_snapshot
from ray_cluster.dispatch.reports.statistics import RATIO_BOUNDS, Histogram, size_class
from ray_cluster.protocol.leases import Failed
from ray_cluster.requests import Failure
from tests.fakes import finished, image_request, poll_of, registration


def test_a_class_is_the_smallest_square_of_a_power_of_two() -> None:
    sizes = [(64, 64), (64, 65), (128, 32), (8, 8), (1024, 1024), (1024, 1025)]
    classes = [size_class(size_px) for size_px in sizes]
    assert classes == ["64", "128", "64", "8", "1024", "2048"]


def test_ratios_stand_in_the_bucket_of_their_bound() -> None:
    ratios = Histogram(RATIO_BOUNDS)
    for ratio in (0.2, 1.0, 1.05, 99.0):
        ratios = ratios.plus(ratio)
    found = dict(zip((*RATIO_BOUNDS, None), ratios.counts, strict=True))
    assert (found[0.5], found[1.0], found[1.1], found[None]) == (1, 1, 1, 1)
    assert sum(ratios.counts) == 4
    assert ratios.total == pytest.approx(101.25)


def test_ends_are_counted_but_those_that_clients_called_off_or_brought_about_are_not() -> None:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    core.register(registration(max_in_flight=4), 0.0)
    offers = [core.offer([image_request(name, slo_s=5.0)], 0.0) for name in ("a", "b", "c", "d")]
    leases = {one.request.request_id: one for one in core.poll(poll_of(num_free=4), 0.0).leases}
    core.report("r", [finished(leases["a"])], 2.0)
    core.report("r", [finished(leases["b"])], 9.0)
    core.abort(["c"])
    core.report(
        "r", [Failed("d", leases["d"].fence, Failure("d", "invalid", "long", "encode"))], 9.0
    )
    cluster = core.snapshot(9.0)
    assert cluster.totals["invalid"] == 1
    assert sum(cluster.counters.met.values()) == sum(cluster.counters.missed.values()) == 1
    expected = sum(took / one.predicted_s for took, one in zip((2.0, 9.0), offers, strict=False))
    assert cluster.counters.ratios["m"].total == pytest.approx(expected)
    text = str(cell_snapshot(cluster, JobCounts()))
    assert "ray_cluster_deadlines" in text
    assert "ray_cluster_real_over_predicted" in text
    assert "ray_cluster_stage_seconds" in text


def test_refusals_are_counted_by_reason_and_unknown_models_are_no_labels() -> None:
    limits = LimitsConfig(max_queued_images=2)
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1, configured={"soon"})
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    for number in range(3):
        core.offer([image_request(f"many-{number}")], 0.0)
    core.offer([image_request("x", model="soon")], 0.0)
    core.offer([image_request("y", model="made-up-1")], 0.0)
    core.offer([image_request("z", model="made-up-2"), image_request("zz", model="made-up-2")], 0.0)
    assert core.snapshot(1.0).counters.refused == {
        ("m", "queue_full"): 1,
        ("soon", "model_not_ready"): 1,
        ("other", "unknown_model"): 3,
    }
