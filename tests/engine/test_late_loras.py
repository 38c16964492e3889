"""Requests that begin without their LoRAs make the images of diffusers with the same switch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.engine.models.loading import start_states
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_call import LateLoras
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.engine.conftest import DITS, Zoo
from tests.engine.dits import dit_request
from tests.engine.harness import (
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    difference,
    engine_of,
    pixel_difference,
    request,
    taken,
)
from tests.engine.random_loras import save_loras
from tests.engine.staged import Running, StagedModel

# peft, of the reference that has several
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Record = Callable[[str, object], None]

MODELS = ("sd15", "sdxl", "sd3", "flux")
# what steps are called with, of what the pipelines let a callback exchange
_CONDITIONS = {
    "sd15": ("prompt_embeds",),
    "sdxl": ("prompt_embeds", "add_text_embeds"),
    "sd3": ("prompt_embeds", "pooled_prompt_embeds"),
    "flux": (),
}
# LoRAs by number with their scales, and how many steps are without: the second LoRA leaves the
# text encoders as they are
CASES: tuple[tuple[dict[int, float], int], ...] = (
    ({0: 1.0}, 2),
    ({1: 0.8}, 1),
    ({1: 0.7, 2: -0.5}, 3),
    ({0: 1.0}, 0),
    ({}, 0),
)
# FLUX's pipeline lets nobody exchange its pooled prompts
OF_FLUX = tuple(({1: 1.0} if case else {}, start) for case, start in CASES)
SAMPLERS = ("ddim", "euler", "dpmpp_2m")


class Calling:
    """A pipeline that is called with further arguments."""

    def __init__(self, inner: Any, **more: Any) -> None:
        vars(self).update(_inner=inner, _more=more)

    @property
    def __class__(self) -> Any:
        # FLUX's latents are unpacked by it
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __call__(self, **given: Any) -> Any:
        return self._inner(**given, **self._more)


class Subject:
    """A model with three LoRAs, and what diffusers makes of each request."""

    def __init__(self, zoo: Zoo, name: str, folder: Path) -> None:
        self.name, self.model, self.reference = name, zoo.model(name), zoo.reference(name)
        self.cases = OF_FLUX if name == "flux" else CASES
        self.requests = [self._request(index) for index in range(len(self.cases))]
        pipeline = self.reference.pipeline
        files = save_loras(pipeline, folder, 3)
        reader = LoraReader()
        self._loras = [reader.read(path, zoo.folder(name)) for path in files]
        try:
            for index, path in enumerate(files):
                pipeline.load_lora_weights(path, adapter_name=str(index))
            self.expected = [self._expected(index) for index in range(len(self.cases))]
        finally:
            pipeline.unload_lora_weights()

    def _request(self, index: int) -> ImageRequest:
        loras, start = self.cases[index]
        uses = tuple(LoraUse(str(number), scale) for number, scale in loras.items())
        changes: dict[str, Any] = {} if self.name in DITS else {"sampler": SAMPLERS[index % 3]}
        return (dit_request if self.name in DITS else request)(
            f"r{index}",
            prompt="red " * (index + 1),
            num_steps=4,
            guidance_scale=(3.0, 1.0)[index == 1],
            seed=index,
            add_ons=AddOns(loras=uses, lora_start_step=start),
            **changes,
        )

    def _expected(self, index: int) -> Tensor:
        (loras, start), one = self.cases[index], self.requests[index]
        pipeline = self.reference.pipeline

        def switch() -> None:
            if loras:
                pipeline.enable_lora()
                pipeline.set_adapters([str(number) for number in loras], list(loras.values()))

        def callback(_pipeline: Any, step: int, _time: Any, tensors: dict[str, Tensor]) -> Any:
            if step + 1 == start:
                switch()
                # what its text encoders make of the prompts from now on
                tensors = {key: new for key, new in self._conditions(one).items() if key in tensors}
            return tensors

        pipeline.disable_lora()
        if start == 0:
            switch()
        names = list(_CONDITIONS[self.name])
        try:
            self.reference.pipeline = Calling(
                pipeline, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names
            )
            return self.reference._latents([one])[0]
        finally:
            self.reference.pipeline = pipeline

    def _conditions(self, one: ImageRequest) -> dict[str, Tensor]:
        """The prompts as the pipeline's steps take them, by its names."""
        pipeline = self.reference.pipeline
        given: dict[str, Any] = {"prompt": one.prompt, "negative_prompt": one.negative_prompt}
        if self.name == "flux":
            return {}
        if self.name == "sd3":
            given |= {"prompt_2": None, "prompt_3": None}
        elif self.name == "sd15":
            given |= {"device": "cpu", "num_images_per_prompt": 1}
        found = pipeline.encode_prompt(**given, do_classifier_free_guidance=one.uses_guidance)
        prompts, negatives, *pooled = found

        def both(positive: Tensor, negative: Tensor) -> Tensor:
            return torch.cat([negative, positive]) if one.uses_guidance else positive

        names = iter(_CONDITIONS[self.name])
        conditions = {next(names): both(prompts, negatives)}
        return conditions | ({next(names): both(*pooled)} if pooled else {})

    def adapters(self, index: int) -> AdapterSet | None:
        loras, _ = self.cases[index]
        if not loras:
            return None
        return bind_adapters(self.model, [(self._loras[key], s) for key, s in loras.items()])

    def late(self, index: int) -> LateLoras:
        own = self.adapters(index)
        assert own is not None
        with torch.inference_mode():
            [conditioning] = self.model.encoder.encode([self.requests[index]], [own.prompts])
        return LateLoras(own.denoiser, None if own.prompts is None else conditioning)

    def start(self, engine: StepEngine, index: int) -> RequestState:
        """Add a row, without what comes late."""
        own = None if self.requests[index].add_ons.lora_start_step else self.adapters(index)
        [state] = start_states(
            self.model,
            [self.requests[index]],
            now_s=0.0,
            deltas=[None if own is None else own.prompts],
        )
        engine.add(state, None if own is None else own.denoiser)
        return state

    def error(self, state: RequestState) -> float:
        return difference(state.latents, self.expected[int(state.request.request_id[1:])])

    def pixels(self, index: int) -> Any:
        with torch.inference_mode():
            return self.model.decoder.decode([self.expected[index]])[0]


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


def run(engine: StepEngine) -> None:
    while engine.can_step:
        assert not engine.step().failed


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_an_image_is_diffusers_whose_loras_come_after_some_steps(
    subjects: Callable[[str], Subject], name: str, record: Record
) -> None:
    """Whenever they arrive: before the first step, or when its peers are done."""
    subject = subjects(name)
    for arrives_early in (True, False):
        engine = engine_of(subject.model)
        states = [subject.start(engine, index) for index in range(len(subject.cases))]
        late = [state for state in states if state.request.add_ons.lora_start_step]
        if not arrives_early:
            run(engine)
            assert engine.is_waiting
            assert [one.step_index for one in late] == [2, 1, 3]
            assert len(engine) == len(late)
        for state in late:
            engine.add_loras(state, subject.late(int(state.request.request_id[1:])))
        run(engine)
        assert len(engine) == 0
        errors = [subject.error(state) for state in states]
        record(f"{name} early {arrives_early}", max(errors))
        assert max(errors) <= RUN_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_another_switch_is_far_away(subjects: Callable[[str], Subject], name: str) -> None:
    subject = subjects(name)
    for index, other in ((0, 1), (1, 2), (2, 2)):
        one = subject.requests[index]
        add_ons = replace(one.add_ons, lora_start_step=other)
        engine = engine_of(subject.model)
        [state] = start_states(subject.model, [replace(one, add_ons=add_ons)], now_s=0.0)
        engine.add(state)
        engine.add_loras(state, subject.late(index))
        run(engine)
        assert subject.error(state) >= CONTROL_FACTOR * RUN_TOLERANCE


@torch.inference_mode()
def test_prompts_change_with_the_loras(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    engine = engine_of(subject.model)
    state = subject.start(engine, 0)
    engine.add_loras(state, replace(subject.late(0), conditioning=None))
    run(engine)
    assert subject.error(state) >= 10 * RUN_TOLERANCE


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_state_goes_on_elsewhere_before_and_after_its_switch(
    subjects: Callable[[str], Subject], num_steps: int
) -> None:
    """Its LoRAs come two steps after its start: before that they are not in its prompts."""
    subject, index = subjects("sd15"), 0
    one = subject.requests[index]
    with torch.inference_mode():
        engine = engine_of(subject.model)
        state = subject.start(engine, index)
        if num_steps > 2:
            engine.add_loras(state, subject.late(index))
        for _ in range(num_steps):
            engine.step()
        data = taken(engine, one.request_id).to_bytes()
    moved = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)
    assert (moved.step_index, moved.lacks_loras) == (num_steps, num_steps <= 2)
    with Running(subject.model) as running:
        running.runner.submit(one, deadline_s=1e12, state=moved, adapters=subject.adapters(index))
        found = running.events.pixels_of(one.request_id)
    assert pixel_difference(found, subject.pixels(index)) <= PIXEL_TOLERANCE


def test_a_runner_steps_others_while_a_request_waits_for_its_loras(
    subjects: Callable[[str], Subject],
) -> None:
    subject = subjects("sd15")
    model = StagedModel(subject.model)
    with Running(model.loaded) as running:
        runner = running.runner
        for index in (0, 1, 2, 4):
            # that of the third is there from the beginning
            adapters = subject.adapters(index) if index == 2 else None
            runner.submit(subject.requests[index], deadline_s=1e12, adapters=adapters)
        for index in (2, 4):
            found = running.events.pixels_of(f"r{index}")
            assert pixel_difference(found, subject.pixels(index)) <= PIXEL_TOLERANCE
        assert runner.num_in_flight == 2
        for index in (0, 1):
            adapters = subject.adapters(index)
            assert adapters is not None
            runner.add_loras(f"r{index}", adapters)
            # once more changes nothing, nor for one that is not here
            runner.add_loras(f"r{index}", adapters)
            runner.add_loras("other", adapters)
            found = running.events.pixels_of(f"r{index}")
            assert pixel_difference(found, subject.pixels(index)) <= PIXEL_TOLERANCE
    # prompts are encoded again only where the text encoders change
    encoded = [name for stage, ids in model.calls if stage == "encode" for name in ids]
    assert sorted(encoded) == ["r0", "r0", "r1", "r2", "r2", "r4"]


def test_a_failed_second_encoding_ends_the_request_alone(
    subjects: Callable[[str], Subject],
) -> None:
    subject = subjects("sd15")
    model = StagedModel(subject.model)

    def fail(stage: str, ids: Any) -> None:
        if stage == "encode" and model.steps_of("r0"):
            raise RuntimeError(f"no prompts of {ids}")

    with Running(model.loaded) as running:
        running.submit(subject.requests[0])
        model.before.append(fail)
        while model.steps_of("r0") < 2:
            time.sleep(0.01)
        adapters = subject.adapters(0)
        assert adapters is not None
        running.runner.add_loras("r0", adapters)
        error = running.events.failure_of("r0")
        assert "no prompts" in str(error)
        running.submit(subject.requests[4])
        assert running.runner.num_in_flight <= 1
