"""An engine merges the LoRAs that are alone in it, in slices, and gives way to others at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.merging import Merger
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    RUN_TOLERANCE,
    all_rows,
    difference,
    request,
    start,
)
from tests.engine.lora_sets import random_set

PLENTY = 1 << 30


class Bench:
    """An engine with its merger, and a clock that only steps and making weights move.

    Attributes:
        now_s: present instant.
        delta_s: what deltas add to a step of a second.
    """

    def __init__(self, zoo: Zoo, *, max_bytes: int = PLENTY) -> None:
        self.model = zoo.model("sd15")
        pipeline = zoo.reference("sd15").pipeline
        self.sets: dict[str, AdapterSet | None] = {
            "a": random_set(self.model, pipeline, seed=0),
            "b": random_set(self.model, pipeline, seed=1),
            "": None,
        }
        self.now_s, self.delta_s, self.num_made = 0.0, 0.2, 0
        self.engine = StepEngine(self.model.executor, all_rows, self.model.tables, lambda: 0.0)
        bench = self

        class Executor:
            def merged(self, deltas: Any) -> Any:
                found = bench.model.executor.merged(deltas)
                make_next = found.make_next

                def timed() -> None:
                    make_next()
                    bench.num_made += 1
                    bench.now_s += 0.02

                found.make_next = timed  # type: ignore[method-assign]
                return found

        executor: Any = Executor()
        self.merger = Merger(self.engine, executor, max_bytes=max_bytes, clock=lambda: self.now_s)

    def add(self, name: str, number: int, num_steps: int = 6) -> Any:
        one = self.request(name, number, num_steps)
        state = start(self.model, one)
        own = self.sets[name]
        self.engine.add(state, own and own.denoiser)
        return state

    def request(self, name: str, number: int, num_steps: int) -> ImageRequest:
        uses = (LoraUse(name, 1.0, name),) if name else ()
        add_ons = AddOns(loras=uses)
        return request(f"{name}{number}", num_steps=num_steps, seed=number, add_ons=add_ons)

    @torch.inference_mode()
    def step(self) -> bool:
        """Take a step; return whether it was taken with merged weights."""
        was_merged = self.engine.weights.merged is not None
        has_deltas = any(row.deltas for row in self.engine.rows.values())
        report = self.engine.step()
        assert not report.failed
        duration_s = 1.0 + (self.delta_s if has_deltas and not was_merged else 0.0)
        self.now_s += duration_s
        self.merger.after_step(replace(report, duration_s=duration_s))
        return was_merged

    def run(self) -> list[bool]:
        found = []
        while len(self.engine):
            found.append(self.step())
        return found

    def unmerged(self, name: str, number: int, num_steps: int) -> torch.Tensor:
        """What a request comes to without any merging, whatever is merged now."""
        merged = self.engine.weights.merged
        self.engine.weights.unmerge()
        engine = StepEngine(self.model.executor, all_rows, self.model.tables, time.monotonic)
        own = self.sets[name]
        state = start(self.model, self.request(name, number, num_steps))
        with torch.inference_mode():
            engine.add(state, own and own.denoiser)
            while len(engine):
                engine.step()
            if merged is not None:
                self.engine.weights.merge(merged)
        return state.latents


@pytest.fixture
def bench(zoo: Zoo) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        made.append(Bench(zoo, **changes))
        return made[-1]

    yield make
    for one in made:
        # the model is that of all tests
        one.engine.weights.unmerge()


def test_a_set_that_is_alone_is_merged_in_slices_and_its_images_are_the_same(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    states = [one.add("a", number, 30) for number in range(2)]
    assert one.merger.merged == ""
    merged = []
    while one.engine.weights.merged is None:
        before = one.num_made
        merged.append(one.step())
        # a tenth of a step, and what was begun within it
        assert one.num_made - before <= 7
    assert one.num_made > 14
    assert one.merger.merged == "a@1.0"
    merged += one.run()
    assert merged == sorted(merged)
    assert merged.count(True) > 10
    for number, state in enumerate(states):
        assert difference(state.latents, one.unmerged("a", number, 30)) <= RUN_TOLERANCE
    # it stays when all are done, for those that come next
    assert one.merger.merged == "a@1.0"
    one.add("a", 9)
    assert all(one.run())
    assert (one.merger.num_merges, one.merger.num_unmerges) == (1, 0)


def test_a_row_of_another_set_puts_the_weights_back_and_they_are_not_made_again(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    one.add("a", 0, 40)
    while one.engine.weights.merged is None:
        one.step()
    num_made = one.num_made
    for name in ("b", ""):
        state = one.add(name, 1, 2)
        assert one.merger.merged == ""
        assert [one.step(), one.step()] == [False, False]
        assert difference(state.latents, one.unmerged(name, 1, 2)) <= RUN_TOLERANCE
        while one.engine.weights.merged is None:
            one.step()
        assert one.step()
    assert one.num_made == num_made
    assert (one.merger.num_merges, one.merger.num_unmerges) == (3, 2)


def test_others_that_are_announced_are_given_way_to_at_once(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.add("a", 0, 40)
    while one.engine.weights.merged is None:
        one.step()
    one.merger.note_others()
    # from now on it may be leased anything, whatever the step thread has done yet
    assert one.merger.merged == ""
    one.now_s -= 1.0
    one.step()
    assert one.engine.weights.merged is None
    # and is not merged again before these can have come
    one.now_s += 2.0
    one.step()
    assert one.merger.merged == "a@1.0"


def test_rows_of_several_sets_are_not_merged(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.add("a", 0, 12)
    one.add("b", 0, 12)
    one.add("", 0, 12)
    assert not any(one.run())
    assert one.num_made == 0


def test_a_set_without_memory_is_not_merged(bench: Callable[..., Bench]) -> None:
    deltas = bench().sets["a"]
    assert deltas is not None
    assert deltas.denoiser is not None
    needed = bench().model.executor.merged(deltas.denoiser).peak_bytes
    for max_bytes, is_merged in ((needed - 1, False), (needed, True)):
        one = bench(max_bytes=max_bytes)
        one.add("a", 0, 30)
        assert any(one.run()) is is_merged
        assert (one.num_made > 0) is is_merged


def test_what_is_measured_slower_is_not_kept(bench: Callable[..., Bench]) -> None:
    one = bench()
    # deltas seem to cost less than nothing
    one.delta_s = -0.5
    for number in range(4):
        one.add("a", number, 30)
        one.run()
    assert one.engine.weights.merged is None
    assert one.merger.num_unmerges == one.merger.num_merges <= 2


def test_an_error_of_making_them_costs_no_row(bench: Callable[..., Bench]) -> None:
    one = bench()
    executor: Any = one.merger._executor
    inner = executor.merged

    def failing(deltas: Any) -> Any:
        found = inner(deltas)

        def fails() -> None:
            raise RuntimeError("out of memory")

        found.make_next = fails
        return found

    executor.merged = failing
    state = one.add("a", 0, 12)
    assert not any(one.run())
    assert difference(state.latents, one.unmerged("a", 0, 12)) <= RUN_TOLERANCE
    assert one.merger.num_merges == 0
