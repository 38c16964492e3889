"""What waits of each client: how much of a model's queue it may fill, and when it may fill more."""

from __future__ import annotations

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from tests.fakes import image_request, poll_of, registration


def test_a_client_waits_until_its_own_requests_have_left() -> None:
    limits = LimitsConfig(max_queued_images=8)
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1)
    core.register(registration(), 0.0)
    first = [core.offer([image_request(f"a{i}")], 0.0, client="a").accepted for i in range(9)]
    second = [core.offer([image_request(f"b{i}")], 0.1, client="b").accepted for i in range(5)]
    assert (sum(first), sum(second)) == (8, 4)
    waits_s = {
        client: core.offer([image_request(f"{client}9")], 0.2, client=client).retry_after_s
        for client in "ab"
    }
    # all eight of the first client are due earlier
    assert waits_s["b"] > 1.5 * waits_s["a"]
    core.poll(poll_of(num_free=4), 0.3)
    again = core.offer([image_request("b10")], 0.3, client="b")
    assert not again.accepted
    assert again.limit == 4
    assert again.retry_after_s < waits_s["b"]
    assert core.offer([image_request("c0")], 0.3, client="c").accepted
