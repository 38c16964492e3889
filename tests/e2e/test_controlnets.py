"""Replicas of ControlNets and of their bases that die or stop: nobody loses an image."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from tests.cell.test_controlnets import NUM_FOLLOWED, are_equal, make, uses_of
from tests.e2e.controlled import hinted
from tests.e2e.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

EDGES_PROCESS = "ray::ServeReplica:edges:ControlNet"
BASE_PROCESS = "ray::ServeReplica:shapes-sd:BaseModel"


def long_calls(
    service: Service, pool: ThreadPoolExecutor, count: int, num_steps: int
) -> list[Future[bytes]]:
    texts, _ = hinted(NUM_FOLLOWED)
    return [
        pool.submit(
            make,
            service,
            prompt=texts[0],
            seed=3,
            num_inference_steps=num_steps,
            controlnets=uses_of(0, "edges"),
        )
        for _ in range(count)
    ]


def until_busy(processes: list[psutil.Process]) -> psutil.Process:
    """Return the first of some processes that computes."""
    before = {one: _cpu_s(one) for one in processes}
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        time.sleep(0.1)
        for process, cpu_s in before.items():
            if _cpu_s(process) > cpu_s + 0.2:
                return process
    raise AssertionError("no process has begun to compute")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def until_there(service: Service, name: str, count: int) -> list[psutil.Process]:
    end_s = time.monotonic() + 120
    while len(found := service.processes(name)) < count:
        assert time.monotonic() < end_s, f"{len(found)} of {count} {name}"
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def reference(service: Service) -> bytes:
    """The image that calls of :func:`long_calls` come to when nothing happens."""
    with ThreadPoolExecutor(1) as pool:
        return long_calls(service, pool, 1, 120)[0].result()


def test_calls_are_answered_by_a_controlnet_of_another_process(service: Service) -> None:
    texts, _ = hinted(NUM_FOLLOWED)
    with ThreadPoolExecutor(2) as pool:
        one, other = (call.result() for call in long_calls(service, pool, 2, 4))
    assert are_equal(one, other)
    assert not are_equal(one, make(service, prompt=texts[0], seed=3, num_inference_steps=4))


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_stops_costs_nobody_an_image(
    service: Service, reference: bytes, way: signal.Signals
) -> None:
    processes = until_there(service, EDGES_PROCESS, 2)
    with ThreadPoolExecutor(4) as pool:
        calls = long_calls(service, pool, 4, 120)
        victim = until_busy(processes)
        victim.send_signal(way)
        try:
            assert all(are_equal(one.result(), reference) for one in calls)
        finally:
            if victim.is_running():
                victim.send_signal(signal.SIGCONT)
    until_there(service, EDGES_PROCESS, 2)


@pytest.mark.slow
def test_all_replicas_go_and_come_back(service: Service, reference: bytes) -> None:
    processes = until_there(service, EDGES_PROCESS, 2)
    with ThreadPoolExecutor(3) as pool:
        calls = long_calls(service, pool, 2, 120)
        until_busy(processes)
        for process in processes:
            process.kill()
        # others are not held up meanwhile
        texts, _ = hinted(NUM_FOLLOWED)
        assert make(service, prompt=texts[1], seed=1)
        assert all(are_equal(one.result(), reference) for one in calls)
    until_there(service, EDGES_PROCESS, 2)


@pytest.mark.slow
def test_a_model_s_replica_dies_with_residuals_under_way(
    service: Service, reference: bytes
) -> None:
    processes = until_there(service, BASE_PROCESS, 2)
    with ThreadPoolExecutor(2) as pool:
        calls = long_calls(service, pool, 2, 120)
        until_busy(processes).kill()
        assert all(are_equal(one.result(), reference) for one in calls)
    until_there(service, BASE_PROCESS, 2)
    assert are_equal(make_reference(service), reference)


def make_reference(service: Service) -> bytes:
    with ThreadPoolExecutor(1) as pool:
        return long_calls(service, pool, 1, 120)[0].result()
