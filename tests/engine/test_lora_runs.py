"""Requests with LoRAs, in one batch with others and with none, make the images of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.adapters.lora_files import LoraFactors, LoraReader
from ray_cluster.engine.models.loading import start_states
from ray_cluster.engine.step.state import RequestState
from ray_cluster.requests import ImageRequest
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
# LoRAs by number with their scales; the first two neighbours share a set
CASES: tuple[dict[int, float], ...] = (
    {0: 1.0},
    {0: 1.0},
    {},
    {1: 0.7, 2: -0.5},
    {2: 0.8},
    {0: 0.5, 1: 0.4, 2: 0.3},
)
SIZES = ((64, 64), (96, 64), (64, 64), (64, 64), (96, 96), (64, 96))
SAMPLERS = ("ddim", "euler", "dpmpp_2m")


def requests_of(name: str) -> list[ImageRequest]:
    found = []
    for index, (width, height) in enumerate(SIZES):
        changes: dict[str, Any] = {"sampler": SAMPLERS[index % 3]}
        if name in DITS:
            changes = {}
        one = (dit_request if name in DITS else request)(
            f"r{index}",
            prompt="red " * (index + 1),
            width_px=width,
            height_px=height,
            num_steps=3 + index % 2,
            guidance_scale=(3.0, 1.0)[index == 4],
            seed=index,
            **changes,
        )
        found.append(one)
    return found


class Subject:
    """A model with three LoRAs, and what diffusers makes of each request."""

    def __init__(self, zoo: Zoo, name: str, folder: Path) -> None:
        self.model, self.reference = zoo.model(name), zoo.reference(name)
        self.requests = requests_of(name)
        pipeline = self.reference.pipeline
        files = save_loras(pipeline, folder, 3)
        reader = LoraReader()
        self.loras = [reader.read(path, zoo.folder(name)) for path in files]
        self._sets: dict[tuple[tuple[int, float], ...], AdapterSet] = {}
        try:
            for index, path in enumerate(files):
                pipeline.load_lora_weights(path, adapter_name=str(index))
            self.expected = [
                self._expected(*pair) for pair in zip(self.requests, CASES, strict=True)
            ]
        finally:
            pipeline.unload_lora_weights()

    def _expected(self, one: ImageRequest, case: dict[int, float]) -> Tensor:
        pipeline = self.reference.pipeline
        if not case:
            pipeline.disable_lora()
        else:
            pipeline.enable_lora()
            # a LoRA without a text encoder cannot be named for it
            pipeline.set_adapters([str(index) for index in case], list(case.values()))
        return self.reference._latents([one])[0]

    def adapters(self, case: dict[int, float]) -> AdapterSet | None:
        """The same for the same LoRAs and scales, as a replica keeps them."""
        if not case:
            return None
        key = tuple(case.items())
        if key not in self._sets:
            loras = [(self.loras[index], scale) for index, scale in case.items()]
            self._sets[key] = bind_adapters(self.model, loras)
        return self._sets[key]

    def errors(self, sets: Sequence[AdapterSet | None], places: Sequence[int] = ()) -> list[float]:
        """How far requests are off that all run together with these."""
        chosen = list(places) or list(range(len(CASES)))
        prompts = [None if sets[index] is None else sets[index].prompts for index in chosen]  # type: ignore[union-attr]
        requests = [self.requests[index] for index in chosen]
        engine = engine_of(self.model)
        with torch.inference_mode():
            states = start_states(self.model, requests, now_s=0.0, deltas=prompts)
            for index, state in zip(chosen, states, strict=True):
                own = sets[index]
                engine.add(state, None if own is None else own.denoiser)
            while len(engine):
                report = engine.step()
                assert not report.failed
        return [
            difference(state.latents, self.expected[index])
            for index, state in zip(chosen, states, strict=True)
        ]


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", MODELS)
def test_every_request_of_a_batch_is_diffusers_with_its_own_loras(
    subjects: Callable[[str], Subject], name: str, record: Record
) -> None:
    subject = subjects(name)
    sets = [subject.adapters(case) for case in CASES]
    together = subject.errors(sets)
    alone = subject.errors(sets, [3])
    record(f"together {name}", max(together))
    record(f"alone {name}", max(alone))
    assert max(together) <= RUN_TOLERANCE
    assert max(alone) <= RUN_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_wrong_loras_are_far_away(subjects: Callable[[str], Subject], name: str) -> None:
    subject = subjects(name)
    sets = [subject.adapters(case) for case in CASES]
    others = [{0: 0.9}, {}, {0: 1.0}, {1: 0.7, 2: 0.5}, {1: 0.8}, {0: 0.5, 1: 0.4}]
    wrong = subject.errors([subject.adapters(case) for case in others])
    assert min(wrong) >= CONTROL_FACTOR * RUN_TOLERANCE
    without_prompts = [
        None if one is None else AdapterSet(one.denoiser, None, one.layers) for one in sets
    ]
    bare = subject.errors(without_prompts)
    for error, one in zip(bare, sets, strict=True):
        if one is not None and one.prompts is not None:
            assert error >= 10 * RUN_TOLERANCE


def test_rows_without_loras_are_what_they_are_without_any(
    subjects: Callable[[str], Subject],
) -> None:
    """The prompts of others that have them change nothing."""
    subject = subjects("sdxl")
    encoder, own = subject.model.encoder, subject.adapters(CASES[0])
    assert own is not None
    pair = subject.requests[:2]
    with torch.inference_mode():
        plain = encoder.encode(pair)
        mixed = encoder.encode(pair, [own.prompts, None])
    assert torch.equal(plain[1].prompt_embeds, mixed[1].prompt_embeds)
    assert not torch.equal(plain[0].prompt_embeds, mixed[0].prompt_embeds)


def test_factors_from_a_file_are_mapped_and_make_the_same_images(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject, path = subjects("sd15"), tmp_path / "lora.safetensors"
    write_factors(subject.loras[0], path)
    factors: LoraFactors = open_factors(path)
    places = {one.shrink.data_ptr() for one in factors.layers}
    bound = bind_adapters(subject.model, [(factors, 1.0)])
    starts = [line.split("-")[0] for line in _maps() if line.rstrip().endswith(str(path))]
    assert starts
    assert min(places) >= min(int(start, 16) for start in starts)
    assert subject.errors([bound, bound], [0, 1]) == subject.errors(
        [subject.adapters(CASES[0])] * 2, [0, 1]
    )


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_a_request_goes_on_elsewhere_with_its_loras(subjects: Callable[[str], Subject]) -> None:
    """Its state has its prompts as its LoRAs changed them; the factors come again."""
    subject = subjects("sd15")
    own, one = subject.adapters(CASES[3]), subject.requests[3]
    first = subject.adapters(CASES[0])
    assert own is not None
    assert first is not None
    with torch.inference_mode():
        [state] = start_states(subject.model, [one], now_s=0.0, deltas=[own.prompts])
        engine = engine_of(subject.model)
        engine.add(state, own.denoiser)
        engine.step()
        data = taken(engine, one.request_id).to_bytes()
    for adapters, is_right in ((own, True), (first, False)):
        moved = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)
        with Running(subject.model) as running:
            running.runner.submit(one, deadline_s=1e12, state=moved, adapters=adapters)
            found = running.events.pixels_of(one.request_id)
        assert (pixel_difference(found, _pixels(subject, 3)) <= PIXEL_TOLERANCE) is is_right


def test_a_runner_makes_images_with_loras(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    model = StagedModel(subject.model)
    with Running(model.loaded) as running:
        # so that all are encoded together
        gate = model.gate("encode", "r0")
        for one, case in zip(subject.requests, CASES, strict=True):
            running.runner.submit(one, deadline_s=1e12, adapters=subject.adapters(case))
            if one.request_id == "r0":
                gate.await_reached()
        gate.open()
        for index, one in enumerate(subject.requests):
            found = running.events.pixels_of(one.request_id)
            assert pixel_difference(found, _pixels(subject, index)) <= PIXEL_TOLERANCE
    encoded = [ids for stage, ids in model.calls if stage == "encode"]
    assert [len(ids) for ids in encoded] == [1, len(CASES) - 1]


def _pixels(subject: Subject, index: int) -> Any:
    with torch.inference_mode():
        return subject.model.decoder.decode([subject.expected[index]])[0]
