"""What is refused is counted by reason, and judged when its deadline has passed."""

from __future__ import annotations

import pytest

from ray_cluster.config.sections import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.metrics import cell_snapshot
from ray_cluster.policies.prediction_error import RECENT
from tests.fakes import finished, image_request, poll_of, registration


def new_core() -> DispatchCore:
    limits = LimitsConfig(max_queued_images=2)
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1, configured={"soon"})
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    return core


def make_images(core: DispatchCore, count: int, begin_s: float, *, exceeded: float) -> float:
    """Make images one by one, each in so many times what was predicted; return when it is over."""
    now_s = begin_s
    for number in range(count):
        offer = core.offer([image_request(f"{begin_s}-{number}")], now_s)
        [lease] = core.poll(poll_of(num_free=1), now_s).leases
        now_s += exceeded * offer.predicted_s
        core.report("r", [finished(lease)], now_s)
        now_s += 1000.0
    return now_s


@pytest.mark.parametrize(("exceeded", "verdict"), [(1.5, "false"), (2.5, "right")])
def test_a_refusal_was_right_if_images_take_longer_than_it_could_bear(
    exceeded: float, verdict: str
) -> None:
    core = new_core()
    now_s = make_images(core, 40, 0.0, exceeded=3.0)
    predicted_s = core.offer([image_request("alone")], now_s).predicted_s
    core.abort(["alone"])
    slo_s = 2.0 * predicted_s
    late = core.offer([image_request("late", slo_s=slo_s, when_late="refuse")], now_s)
    assert (late.reason, late.bearable) == ("too_late", pytest.approx(2.0))
    cluster = core.snapshot(now_s)
    assert (cluster.refused, cluster.verdicts) == ({("m", "too_late"): 1}, {})
    # it is told from what comes after it
    now_s = make_images(core, RECENT - 1, now_s, exceeded=exceeded)
    assert core.snapshot(now_s).verdicts == {}
    make_images(core, 1, now_s, exceeded=exceeded)
    cluster = core.snapshot(now_s)
    assert cluster.verdicts == {("m", verdict): 1}
    assert "ray_cluster_refusal_verdicts" in str(cell_snapshot(cluster, 0))


def test_reasons_are_counted_and_unknown_models_are_no_labels() -> None:
    core = new_core()
    for number in range(3):
        core.offer([image_request(f"many-{number}")] * 1, 0.0)
    core.offer([image_request("x", model="soon")], 0.0)
    core.offer([image_request("y", model="made-up-1")], 0.0)
    core.offer([image_request("z", model="made-up-2"), image_request("zz", model="made-up-2")], 0.0)
    assert core.snapshot(1.0).refused == {
        ("m", "queue_full"): 1,
        ("soon", "model_not_ready"): 1,
        ("other", "unknown_model"): 3,
    }
