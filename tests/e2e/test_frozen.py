"""A process that freezes (a paused machine, a swapping host) costs its own leases and no more."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.e2e.service import Service, post

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_frozen_replica_does_not_stop_the_cell(service: Service) -> None:
    _wait_until_served(service)
    frozen = service.replicas()[0]
    frozen.suspend()
    try:
        # longer than `replica_timeout_s`: its leases are free again
        time.sleep(8.0)
        replies = [post(service, num_inference_steps=2) for _ in range(3)]
        assert frozen.status() == psutil.STATUS_STOPPED
    finally:
        frozen.resume()
    for reply in replies:
        assert reply.status_code == 200, reply.text


def _wait_until_served(service: Service) -> None:
    """Both replicas pull work: they may have been started a moment ago."""
    deadline_s = time.monotonic() + 90
    while len(service.replicas()) < 2 or post(service, num_inference_steps=2).status_code != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.5)
