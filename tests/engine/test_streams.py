"""Stages queue in streams of their own, and hand over only what is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.building import build_runner
from ray_cluster.engine.dit.rotary import Rotary
from ray_cluster.engine.events import Decoded, RunnerEvent, Stepped
from ray_cluster.engine.streams import StageStream
from tests.engine.conftest import Zoo
from tests.engine.harness import pool, request, start
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
    monkeypatch.setattr("ray_cluster.engine.runner.StageStream", Recorded)
    requests = [request(f"r{index}", seed=index) for index in range(3)]
    model = StagedModel(zoo.model("sd"), requests)
    with Running(model.loaded) as running:
        running.submit(requests[0])
        running.events.pixels_of("r0")
        # one that goes on here: it was not encoded here
        state: Any = start(zoo.model("sd"), requests[1])
        running.runner.submit(requests[1], deadline_s=1e12, state=state)
        running.events.pixels_of("r1")
    by_thread = {stream.thread: stream for stream in Recorded.made}
    assert set(by_thread) == {"encode", "denoise", "decode"}
    assert [name for name, one in by_thread.items() if one.is_urgent] == ["denoise"]
    assert by_thread["encode"].calls == [("synchronize", "encode", 0)]
    # latents, estimate and the embeddings of both prompts
    assert by_thread["denoise"].calls == [("adopt", "denoise", 4)] * 2
    assert by_thread["decode"].calls == [("adopt", "decode", 1)] * 2


def test_warming_up_runs_every_stage_in_its_own_thread(zoo: Zoo) -> None:
    model = zoo.model("sd")
    found: list[tuple[str, RunnerEvent]] = []
    runner = build_runner(
        model,
        pool("unused"),
        lambda event: found.append((threading.current_thread().name, event)),
        clock=time.monotonic,
    )
    runner.start()
    try:
        runner.warm_up()
    finally:
        runner.stop()
    made = {(thread, one.request) for thread, one in found if isinstance(one, Decoded)}
    assert {thread for thread, _ in made} == {"decode"}
    assert {request.uses_guidance for _, request in made} == {True, False}
    assert {request.sampler for _, request in made} == {"euler_ancestral"}
    assert {thread for thread, one in found if isinstance(one, Stepped)} == {"denoise"}
    assert runner.num_in_flight == 0


def test_a_wait_for_a_stream_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            calls.append(("event", blocking))

        def record(self, stream: Any) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device.index, priority))
    StageStream(torch.device("cuda:1"), is_urgent=True).synchronize()
    assert calls == [("event", True), ("record", (1, -1)), "synchronize"]


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
