"""Stages queue in streams of their own, and hand over only what is done."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.device.streams import StageStream, finish_queued, sent
from ray_cluster.engine.dit.rotary import Rotary
from ray_cluster.engine.stages.warmup import measure_step_cost, warm_up
from ray_cluster.requests import ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import request, start
from tests.engine.staged import Running, StagedModel


class Recorded:
    """Takes the place of a stream, and notes what is asked of it and in which thread."""

    made: list[Recorded]

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self.is_urgent = is_urgent
        self.thread = ""
        self.calls: list[tuple[str, str, int]] = []
        Recorded.made.append(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.thread = threading.current_thread().name
        yield

    def synchronize(self) -> None:
        self._note("synchronize", 0)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        self._note("adopt", len(list(tensors)))

    def _note(self, call: str, number: int) -> None:
        self.calls.append((call, threading.current_thread().name, number))


def test_every_stage_has_a_stream_and_waits_before_it_hands_over(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorded.made = []
    monkeypatch.setattr("ray_cluster.engine.stages.runner.StageStream", Recorded)
    requests = [request(f"r{index}", seed=index) for index in range(3)]
    model = StagedModel(zoo.model("sd"), requests)
    with Running(model.loaded) as running:
        running.submit(requests[0])
        running.events.pixels_of("r0")
        # one that goes on here: it was not encoded here
        state: Any = start(zoo.model("sd"), requests[1])
        running.runner.submit(requests[1], deadline_s=1e12, state=state)
        running.events.pixels_of("r1")
        factors = LowRank(torch.ones(1, 1), torch.ones(1, 1))
        adapters = AdapterSet(None, None, (factors,))
        running.runner.submit(requests[2], deadline_s=1e12, adapters=adapters)
        running.events.pixels_of("r2")
    by_thread = {stream.thread: stream for stream in Recorded.made}
    # no image came in, so nothing was done in the stream that encodes them
    assert set(by_thread) == {"image", "encode", "denoise", "decode"}
    assert by_thread["image"].calls == []
    assert [name for name, one in by_thread.items() if one.is_urgent] == ["denoise"]
    waited = ("synchronize", "encode", 0)
    calls = [("adopt", "encode", 0), waited, ("adopt", "encode", 2), waited]
    assert by_thread["encode"].calls == calls
    # latents, estimate and the embeddings of both prompts; the factors of one LoRA
    calls = [("adopt", "denoise", 4)] * 2
    assert by_thread["denoise"].calls == [*calls, ("adopt", "denoise", 4), ("adopt", "denoise", 2)]
    assert by_thread["decode"].calls == [("adopt", "decode", 1)] * 3


def ticking() -> Callable[[], float]:
    """A clock that goes on by one each time it is read."""
    return itertools.count().__next__


def test_requests_are_served_by_the_threads_and_streams_that_were_warmed_up(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorded.made = []
    monkeypatch.setattr("ray_cluster.engine.stages.runner.StageStream", Recorded)
    model = StagedModel(zoo.model("sd"))
    threads: dict[str, set[int]] = {}
    encoded: list[ImageRequest] = []
    encode = model.encode

    def noted(requests: Sequence[ImageRequest], deltas: Sequence[Any] = ()) -> Any:
        encoded.extend(requests)
        return encode(requests, deltas)

    monkeypatch.setattr(model, "encode", noted)
    model.before.append(
        lambda stage, _ids: threads.setdefault(stage, set()).add(threading.get_ident())
    )
    running = Running(model.loaded)
    given = running.runner.model
    cost = warm_up(given, max_batch=3, clock=ticking(), call=running.runner.call)
    assert {name: len(found) for name, found in threads.items()} == {
        "encode": 1,
        "denoise": 1,
        "decode": 1,
    }
    # what each of them has queued is done before another reads it
    waits = [(call, thread) for one in Recorded.made for call, thread, _ in one.calls]
    assert set(waits) == {("synchronize", name) for name in (*threads, "image")}
    last = encoded[-2:]
    assert all(one.guidance_scale > 1 for one in last)
    assert "euler_ancestral" in {one.sampler for one in last}
    with running:
        running.submit(request("real"))
        running.events.pixels_of("real")
    assert all(len(found) == 1 for found in threads.values())
    # the same sizes and the same fit as in one thread
    assert cost == measure_step_cost(zoo.model("sd"), max_batch=3, clock=ticking())


def test_what_a_warm_up_raises_reaches_who_asked_for_it(zoo: Zoo) -> None:
    running = Running(zoo.model("sd"))

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        running.runner.call("denoise", fail)
    assert running.runner.call("denoise", torch.is_inference_mode_enabled)
    running.runner.stop()
    assert not running.events.all


class FakeCuda:
    """What waits are made of, as torch.cuda has it; notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        note = self.calls.append

        class Stream:
            def __init__(self, _device: Any = None, priority: int = 0) -> None:
                note(("stream", priority))

            def synchronize(self) -> None:
                raise AssertionError("the thread polls until the stream is done")

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                self.blocking = blocking

            def record(self, stream: Any) -> None:
                assert isinstance(stream, Stream)
                note(("record",))

            def synchronize(self) -> None:
                note(("wait", self.blocking))

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)


def test_a_stage_sleeps_while_it_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    stream = StageStream(torch.device("cuda"), is_urgent=True)
    stream.synchronize()
    stream.synchronize()
    finish_queued(torch.device("cuda"))
    waits = [call for call in cuda.calls if call[0] != "stream"]
    assert waits == [("record",), ("wait", True)] * 3
    finish_queued(torch.device("cpu"))
    assert len(cuda.calls) == 2 + len(waits)


def test_what_a_step_sends_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        def pin_memory(self) -> Host:
            calls.append("pinned")
            return self

        def to(self, device: torch.device, *, non_blocking: bool = False) -> Host:
            calls.append((device.type, non_blocking))
            return self

    calls: list[Any] = []
    host: Any = Host()
    sent(host, torch.device("cuda:0"))
    assert calls == ["pinned", ("cuda", True)]
    calls.clear()
    sent(host, torch.device("cpu"))
    assert calls == [("cpu", False)]


def test_an_estimate_is_turned_alike_whatever_it_is_turned_in() -> None:
    """Halves change places before they are widened: half the bytes, and the same bits."""
    torch.manual_seed(0)
    rows = torch.randn(50, 3, 16).to(torch.bfloat16)
    angles = torch.randn(50, 1, 16)
    rotary = Rotary(angles.cos(), angles.sin())
    whole = rows.float()
    real, imaginary = whole.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    expected = torch.addcmul(whole * rotary.cosines, turned, rotary.sines).to(rows.dtype)
    assert torch.equal(rotary(rows), expected)


@pytest.mark.parametrize("name", ["sd35", "flux"])
def test_a_state_of_another_dtype_goes_on(zoo: Zoo, name: str) -> None:
    """Pools of one model may have different dtypes; what a prompt came to is cast."""
    model = zoo.model(name)
    one = request(sampler="flow_match_euler")
    conditioning = start(model, one).conditioning
    doubled = type(conditioning)(
        **{key: tensor.double() for key, tensor in conditioning.tensors().items()}
    )
    with torch.inference_mode():
        found, expected = (model.executor.prepare(each) for each in (doubled, conditioning))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.pooled, expected.pooled)
