"""The thread that keeps states: no entry after its deletion, nothing held up by a bad store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.replica.states.writer import StateWriter
from ray_cluster.storage.blob_store import BlobStoreError
from tests.engine.staged import until
from tests.fakes import image_request
from tests.replica.setup import MemoryBlobs


def state(request_id: str = "a", step_index: int = 1) -> RequestState:
    latents = torch.full((4, 2, 2), float(step_index))
    return RequestState(
        request=image_request(request_id),
        conditioning=Conditioning(torch.zeros(3, 5)),
        latents=latents,
        denoised=latents.clone(),
        step_index=step_index,
        generator=torch.Generator(),
        arrival_s=0.0,
        deadline_s=1.0,
    )


def wanted() -> bool:
    return True


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def writer(blobs: MemoryBlobs) -> Iterator[StateWriter]:
    writer = StateWriter(blobs)
    writer.start()
    yield writer
    writer.stop()


class Held:
    """A store's call that hangs until it is let go."""

    def __init__(self, call: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._call = call

    def __call__(self, call: str, _name: str) -> None:
        if call == self._call:
            self.reached.set()
            assert self.go.wait(20)


def idle(writer: StateWriter, *ids: str) -> Callable[[], bool]:
    return lambda: not any(writer.is_busy(one) for one in ids)


def test_the_newest_state_is_in_the_store_until_the_request_ends(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    for steps in (1, 2, 3):
        writer.keep(state(step_index=steps), wanted)
    until(idle(writer, "a"))
    found = RequestState.from_bytes(
        blobs.entries["a.state"], device="cpu", arrival_s=0.0, deadline_s=0.0
    )
    assert found.step_index == 3
    writer.forget("a", is_ended=True)
    until(lambda: not blobs.entries)


def test_a_request_that_others_go_on_with_leaves_its_state(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    writer.keep(state(), wanted)
    until(idle(writer, "a"))
    writer.forget("a", is_ended=False)
    writer.stop()
    assert list(blobs.entries) == ["a.state"]


def test_nothing_is_asked_of_the_store_for_a_request_that_was_never_kept(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    calls: list[str] = []
    blobs.before = lambda call, _name: calls.append(call)
    writer.forget("a", is_ended=True)
    writer.expect("b")
    writer.forget("b", is_ended=True)
    writer.stop()
    assert calls == ["delete"]


def test_a_write_that_is_under_way_when_the_request_ends_leaves_nothing(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    is_wanted = True
    held = blobs.before = Held("put")
    writer.keep(state(), lambda: is_wanted)
    assert held.reached.wait(20)
    is_wanted = False
    writer.forget("a", is_ended=True)
    # the step thread may be late
    writer.keep(state(step_index=2), lambda: is_wanted)
    held.go.set()
    writer.stop()
    assert blobs.puts == ["a.state"]
    assert not blobs.entries


def test_a_store_that_hangs_holds_up_nobody_and_at_most_one_copy_of_a_request(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    held = blobs.before = Held("put")
    writer.keep(state("first"), wanted)
    assert held.reached.wait(20)
    for steps in range(1, 100):
        writer.keep(state("a", steps), wanted)
        assert writer.is_busy("a")
        writer.forget(f"ended-{steps}", is_ended=True)
    assert writer.cost_s is None
    assert writer.keep_all([state("b"), state("c")], lambda _: True, timeout_s=0.1) == {}
    assert len(writer._waiting) == 3
    held.go.set()
    until(idle(writer, "first", "a", "b", "c"))
    assert blobs.puts == ["first.state", "a.state", "b.state", "c.state"]


def test_all_states_are_written_before_the_replica_leaves(
    writer: StateWriter, blobs: MemoryBlobs
) -> None:
    def hook(_call: str, name: str) -> None:
        if name == "bad.state":
            raise BlobStoreError("no room")

    blobs.before = hook
    states = [state("a", 3), state("bad", 4), state("gone", 4), state("b", 5)]
    kept = writer.keep_all(states, lambda name: name != "gone", timeout_s=20.0)
    assert kept == {"a": 3, "b": 5}
    assert blobs.entries.keys() == {"a.state", "b.state"}


def test_a_failing_store_is_told_of_once_in_a_while(
    writer: StateWriter, blobs: MemoryBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(call: str, _name: str) -> None:
        raise BlobStoreError(f"cannot {call}")

    blobs.before = hook
    for steps in range(5):
        writer.keep(state(step_index=steps), wanted)
        until(idle(writer, "a"))
    writer.forget("a", is_ended=True)
    writer.stop()
    assert caplog.text.count("cannot") == 1
    assert "the state store does not take states: cannot put" in caplog.text


def test_costs_are_probed_then_measured_and_forgotten_when_they_are_old() -> None:
    now_s, cpu_s = [0.0], [0.0]
    blobs = MemoryBlobs()

    def cpu_clock() -> float:
        # an eighth of a second between two looks at it
        cpu_s[0] += 0.125
        return cpu_s[0]

    def work(_call: str, _name: str) -> None:
        cpu_s[0] += 2.0

    writer = StateWriter(blobs, clock=lambda: now_s[0], cpu_clock=cpu_clock)
    writer.start()
    assert writer.cost_s is None
    writer.probe(state())
    until(lambda: writer.cost_s is not None)
    assert writer.cost_s == 0.125
    assert not blobs.puts
    blobs.before = work
    writer.keep(state(), wanted)
    until(idle(writer, "a"))
    assert writer.cost_s == 2.125
    # a first write that was dear must not be the last one for ever
    now_s[0] = 31.0
    assert writer.cost_s == 0.125
    writer.stop()
