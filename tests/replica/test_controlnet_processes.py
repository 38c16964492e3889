"""ControlNets' workers in other processes, which are killed, stopped and slow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.errors import RequestFailed
from ray_cluster.protocol.leases import Directory
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.transport.connecting import connect
from ray_cluster.transport.links import Link
from tests.replica.controlnet_bank import (
    PATIENCE_S,
    BankFactory,
    BankProcess,
    ask_of,
    directory,
    expected,
    is_same,
)

# not beside other tests of many processes: workers that answer late are given up
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def started() -> Iterator[BankFactory]:
    with contextlib.closing(BankFactory()) as found:
        yield found


@pytest.fixture
def factory(started: BankFactory) -> Iterator[BankFactory]:
    yield started
    started.kill_all()


@pytest.fixture
def workers(factory: BankFactory) -> list[BankProcess]:
    return [factory.make() for _ in range(2)]


class Base:
    """A base model's replica, and how many workers it has been connected to."""

    def __init__(self) -> None:
        self._num_links = 0
        self.controls = RemoteControlNets(
            clock=time.monotonic,
            on_ready=lambda: None,
            patience_s=1.0,
            connector=self._connect,
        )

    def _connect(self, target: str, secret: str) -> Link:
        link = connect(target, secret)
        self._num_links += 1
        return link

    def use(self, *workers: BankProcess) -> None:
        """Connect to workers, so that each of them gets its share of the requests."""
        self.controls.set_peers(directory(*(one.peer for one in workers)))
        _check([ask_of(100)], list(self.controls.ask([ask_of(100)])))
        until_s = time.monotonic() + PATIENCE_S
        while self._num_links < len(workers):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        # a link is in use just after it is made
        time.sleep(0.1)

    def num_retries(self, *reasons: str) -> float:
        return sum(
            value
            for family in self.controls.metrics()
            for (name, labels), value in family.samples.items()
            if name == "ray_cluster_control_retries_total" and dict(labels)["reason"] in reasons
        )


@pytest.fixture
def base() -> Iterator[Base]:
    found = Base()
    yield found
    found.controls.close()


@pytest.fixture
def controls(base: Base) -> RemoteControlNets:
    return base.controls


def _check(asks: list[ControlNetAsk], futures: list[Future[RowResiduals]]) -> None:
    for ask, future in zip(asks, futures, strict=True):
        assert is_same(future.result(PATIENCE_S), expected(ask))


def _step(controls: RemoteControlNets, step: int, seeds: range = range(6)) -> None:
    asks = [ask_of(seed, step=step) for seed in seeds]
    _check(asks, list(controls.ask(asks)))


def test_a_killed_worker_costs_nothing_but_time(
    base: Base, workers: list[BankProcess], controls: RemoteControlNets
) -> None:
    base.use(*workers)
    _step(controls, 0)
    workers[0].stop()
    asks = [ask_of(seed, step=1) for seed in range(6)]
    futures = list(controls.ask(asks))
    workers[0].kill()
    _check(asks, futures)
    _step(controls, 2)
    assert base.num_retries("closed", "silent") > 0


def test_a_stopped_worker_is_left_alone_until_it_answers(
    base: Base, workers: list[BankProcess], controls: RemoteControlNets
) -> None:
    base.use(*workers)
    _step(controls, 0)
    workers[0].stop()
    for step in range(1, 4):
        _step(controls, step)
    assert base.num_retries("silent") > 0
    # alone it is asked again, and its late answers harm nothing
    controls.set_peers(directory(workers[0].peer))
    workers[1].kill()
    asks = [ask_of(seed, step=9) for seed in range(6)]
    futures = list(controls.ask(asks))
    workers[0].go_on()
    _check(asks, futures)


def test_all_workers_gone_and_another_one_there(
    base: Base, factory: BankFactory, workers: list[BankProcess], controls: RemoteControlNets
) -> None:
    base.use(*workers)
    _step(controls, 0)
    for one in workers:
        one.kill()
    patient = [ask_of(seed, step=1) for seed in range(3)]
    futures = list(controls.ask(patient))
    (late,) = controls.ask([ask_of(9, deadline_s=0.0)])
    with pytest.raises(RequestFailed, match="0 of its replicas are connected"):
        late.result(PATIENCE_S)
    controls.set_peers(directory(factory.make().peer))
    _check(patient, futures)
    # a dispatcher that has just started knows nobody, and does no harm; of several at once on a
    # busy machine, one might be late, and who is late and not listed is given up
    controls.set_peers(Directory())
    _step(controls, 2, range(1))


def test_a_slow_worker_is_helped_by_another_one(
    base: Base, factory: BankFactory, controls: RemoteControlNets
) -> None:
    slow, fast = factory.make(delay_s=1.0), factory.make()
    base.use(slow, fast)
    for step in range(3):
        _step(controls, step, range(4))
    assert base.num_retries("silent") > 0


def test_a_base_replica_that_is_killed_or_stopped_holds_up_nobody(
    factory: BankFactory, workers: list[BankProcess], controls: RemoteControlNets
) -> None:
    controls.set_peers(directory(workers[0].peer))
    other = factory.ask_for_ever(workers[0].peer)
    other.stop()
    _step(controls, 0)
    other.kill()
    _step(controls, 1)
