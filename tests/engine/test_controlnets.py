"""Requests with ControlNets, in one batch with others and with none, make diffusers' images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ControlNetModel
from PIL import Image
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.engine.controls.asks import ControlAsk, RowResiduals
from ray_cluster.engine.controls.bank import ControlBank
from ray_cluster.engine.controls.loading import check_base, controlnet_config, load_controlnet
from ray_cluster.engine.controls.local import LocalControls, SplitControls
from ray_cluster.engine.controls.source import ControlResiduals
from ray_cluster.engine.loading import start_states
from ray_cluster.engine.mixed_step import StepSources
from ray_cluster.engine.state import RequestState
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.errors import ModelUnsupported, RequestFailed
from ray_cluster.requests import AddOns, BlobRef, ControlUse, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    all_rows,
    difference,
    request,
)
from tests.engine.random_controlnets import random_map, save_controlnets
from tests.engine.random_loras import save_loras
from tests.engine.reference import DIFFUSERS_BY_SAMPLER

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Record = Callable[[str, object], None]

_NONE = BlobRef("", 0)
PIPELINES = {
    "sd15": "StableDiffusionControlNetPipeline",
    "shapes": "StableDiffusionControlNetPipeline",
    "sdxl": "StableDiffusionXLControlNetPipeline",
}


def use(name: str, **changes: Any) -> ControlUse:
    return ControlUse(name, _NONE, **changes)


# by row its ControlNets; the fourth row has a LoRA too
CASES: tuple[tuple[ControlUse, ...], ...] = (
    (use("0"),),
    (use("1", scale=0.7), use("0", scale=0.4)),
    (),
    (use("2", start=0.3, end=0.7),),
    (use("0", end=0.5), use("1", start=0.5, scale=1.5), use("2", scale=0.0)),
    (use("2", scale=0.5), use("2", scale=0.3)),
)
WITH_LORA = 3
SIZES = ((64, 64), (96, 64), (64, 64), (64, 64), (96, 96), (64, 96))
SAMPLERS = ("ddim", "euler", "pndm")
# where the Euler samplers start from sigma 4096, float32 is too coarse to compare anything
ZERO_SNR_SAMPLERS = ("ddim", "dpmpp_2m", "ddim")


def requests_of(model: str) -> list[ImageRequest]:
    """Rows that differ in all they can: sizes, samplers, prompts, steps, guidance, ControlNets."""
    return [
        request(
            f"r{index}",
            prompt="red " * (index + 1),
            width_px=width,
            height_px=height,
            num_steps=4 + index % 2,
            guidance_scale=(3.0, 1.0)[index == 4],
            sampler=(ZERO_SNR_SAMPLERS if model == "shapes" else SAMPLERS)[index % 3],
            seed=index,
            add_ons=AddOns(controls=CASES[index]),
        )
        for index, (width, height) in enumerate(SIZES)
    ]


class Subject:
    """A model with three ControlNets and a LoRA, and what diffusers makes of each request."""

    def __init__(self, zoo: Zoo, name: str, folder: Path) -> None:
        self.name, self.model, self.reference = name, zoo.model(name), zoo.reference(name)
        self.requests = requests_of(name)
        base = self.reference.pipeline
        self.paths = save_controlnets(base, folder, 3)
        [lora] = save_loras(base, folder, 1)
        self.adapters = bind_adapters(
            self.model, [(LoraReader().read(lora, zoo.folder(name)), 1.0)]
        )
        self.nets = [ControlNetModel.from_pretrained(path) for path in self.paths]
        pipeline = getattr(diffusers, PIPELINES[name])(**base.components, controlnet=self.nets)
        pipeline.set_progress_bar_config(disable=True)
        try:
            base.load_lora_weights(lora, adapter_name="one")
            self.expected = [self._expected(pipeline, index) for index in range(len(CASES))]
        finally:
            base.unload_lora_weights()

    def _expected(self, pipeline: Any, index: int) -> Tensor:
        one, base = self.requests[index], self.reference.pipeline
        (base.enable_lora if index == WITH_LORA else base.disable_lora)()
        uses = one.add_ons.controls
        if not uses:
            return self.reference._latents([one])[0]
        own = getattr(diffusers, PIPELINES[self.name])(
            **base.components, controlnet=[self.nets[int(one.name)] for one in uses]
        )
        own.set_progress_bar_config(disable=True)
        options = {"skip_prk_steps": True} if one.sampler == "pndm" else {}
        kind = DIFFUSERS_BY_SAMPLER[one.sampler]
        own.scheduler = kind.from_config(self.reference.scheduler_config, **options)
        latents: Tensor = own(
            one.prompt,
            image=[Image.fromarray(array) for array in self.maps(index)],
            height=one.height_px,
            width=one.width_px,
            num_inference_steps=one.num_steps,
            guidance_scale=one.guidance_scale,
            controlnet_conditioning_scale=[one.scale for one in uses],
            control_guidance_start=[one.start for one in uses],
            control_guidance_end=[one.end for one in uses],
            generator=torch.Generator().manual_seed(one.seed),
            output_type="latent",
        ).images
        return latents[0]

    def maps(self, index: int) -> list[Any]:
        """The maps of a row, one a use."""
        one = self.requests[index]
        return [
            random_map(10 * index + place, one.width_px, one.height_px)
            for place in range(len(one.add_ons.controls))
        ]

    def banks(self, max_bytes: int = 1 << 30) -> dict[str, ControlBank]:
        device = torch.device("cpu")
        return {
            str(index): ControlBank(load_controlnet(str(path), device), max_bytes=max_bytes)
            for index, path in enumerate(self.paths)
        }

    @torch.inference_mode()
    def states(self, places: Sequence[int]) -> list[RequestState]:
        sets = [self._set(index) for index in places]
        requests = [self.requests[index] for index in places]
        prompts = [None if one is None else one.prompts for one in sets]
        states = start_states(self.model, requests, now_s=0.0, deltas=prompts)
        return [
            replace(state, maps=tuple(map(torch.from_numpy, self.maps(index))))
            for index, state in zip(places, states, strict=True)
        ]

    def _set(self, index: int) -> AdapterSet | None:
        return self.adapters if index == WITH_LORA else None

    @torch.inference_mode()
    def errors(
        self,
        controls: Any,
        places: Sequence[int] = tuple(range(len(CASES))),
        *,
        layout: str = "mixed",
    ) -> list[float]:
        """How far requests are off that all run together."""
        engine = engine_with(self, controls, layout)
        states = self.states(places)
        for index, state in zip(places, states, strict=True):
            own = self._set(index)
            engine.add(state, None if own is None else own.denoiser)
        while len(engine):
            report = engine.step()
            assert not report.failed
        return [
            difference(state.latents, self.expected[index])
            for index, state in zip(places, states, strict=True)
        ]


def engine_with(subject: Subject, controls: Any, layout: str = "mixed") -> StepEngine:
    clock = Clock()
    source = ControlResiduals(controls, clock)
    return StepEngine(
        subject.model.executor,
        all_rows,
        subject.model.tables,
        clock,
        layout=lambda _sizes: layout,  # type: ignore[arg-type, return-value]
        sources=StepSources(residuals=source),
    )


class Clock:
    """Stands still: nothing is late unless it is not there at all."""

    def __call__(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("layout", ["mixed", "grouped"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_request_of_a_batch_is_diffusers_with_its_own_controlnets(
    subjects: Callable[[str], Subject], name: str, layout: str, record: Record
) -> None:
    subject = subjects(name)
    errors = subject.errors(LocalControls(subject.banks()), layout=layout)
    record("worst", max(errors))
    assert max(errors) <= RUN_TOLERANCE, errors


@pytest.mark.parametrize("name", PIPELINES)
def test_so_is_each_alone(subjects: Callable[[str], Subject], name: str) -> None:
    subject = subjects(name)
    controls = LocalControls(subject.banks())
    for place in range(len(CASES)):
        assert subject.errors(controls, [place]) <= [RUN_TOLERANCE]


def test_what_a_full_bank_drops_is_made_anew(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks(max_bytes=1)
    assert max(subject.errors(LocalControls(banks))) <= RUN_TOLERANCE
    assert all(len(bank) <= 1 for bank in banks.values())


def test_requests_that_have_left_are_not_kept(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks()
    subject.errors(LocalControls(banks))
    assert [len(bank) for bank in banks.values()] == [0, 0, 0]


# --- what must not pass ---


@dataclass
class Wrong:
    """Changes what is asked, or what is answered."""

    inner: LocalControls
    asked: Callable[[Sequence[ControlAsk]], Sequence[ControlAsk]] = lambda asks: asks
    answered: Callable[[list[Any]], list[Any]] = lambda found: found

    def ask(self, asks: Sequence[ControlAsk]) -> Sequence[Future[RowResiduals]]:
        return self.answered(list(self.inner.ask(self.asked(asks))))

    def forget(self, key: str) -> None:
        self.inner.forget(key)

    def usual_s(self, _name: str) -> float:
        return 0.0


class Stale:
    """Answers each step with the residuals of the one before."""

    def __init__(self) -> None:
        self._last: list[Any] = []

    def __call__(self, found: list[Any]) -> list[Any]:
        last, self._last = self._last, found
        return last if len(last) == len(found) else found


CONTROLS: dict[str, dict[str, Callable[[], Any]]] = {
    "an earlier step's residuals": {"answered": Stale},
    "another row's residuals": {"answered": lambda: lambda found: found[::-1]},
    "another map": {
        "asked": lambda: lambda asks: [replace(one, map=255 - one.map) for one in asks]
    },
    "a wrong timestep": {
        "asked": lambda: lambda asks: [replace(one, timestep=one.timestep / 2) for one in asks]
    },
}


@pytest.mark.parametrize("wrong", CONTROLS)
def test_a_mistake_is_seen(subjects: Callable[[str], Subject], wrong: str) -> None:
    """Two rows of one size, so that what is either's fits the other."""
    subject = subjects("sd15")
    changes = {name: make() for name, make in CONTROLS[wrong].items()}
    errors = subject.errors(Wrong(LocalControls(subject.banks()), **changes), [0, 3])
    assert max(errors) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_without_residuals_the_images_are_others(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    for index in (0, 1, 3, 4, 5):
        plain = replace(subject.requests[index], add_ons=AddOns())
        bare = subject.reference._latents([plain])[0]
        assert difference(bare, subject.expected[index]) >= CONTROL_FACTOR * RUN_TOLERANCE


# --- answers that are late ---


class Remote:
    """Answers when it is told to."""

    def __init__(self, inner: LocalControls) -> None:
        self._inner = inner
        self.is_slow = True
        self.num_asked = 0
        self.forgotten: list[str] = []
        self._open: list[tuple[ControlAsk, Future[RowResiduals]]] = []

    def ask(self, asks: Sequence[ControlAsk]) -> Sequence[Future[RowResiduals]]:
        self.num_asked += len(asks)
        futures: list[Future[RowResiduals]] = [Future() for _ in asks]
        self._open += zip(asks, futures, strict=True)
        if not self.is_slow:
            self.answer()
        return futures

    def answer(self, error: Exception | None = None) -> None:
        """Answer all that is outstanding."""
        for ask, future in self._open:
            if not future.set_running_or_notify_cancel():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(self._inner.ask([ask])[0].result())
        self._open = []

    def forget(self, key: str) -> None:
        self.forgotten.append(key)
        self._inner.forget(key)

    def usual_s(self, _name: str) -> float:
        return 0.0


@torch.inference_mode()
def test_rows_whose_residuals_are_late_repeat_their_step_and_no_other_does(
    subjects: Callable[[str], Subject],
) -> None:
    """Every second step is late: all images are what they were, row 2's as fast as ever."""
    subject = subjects("sd15")
    remote = Remote(LocalControls(subject.banks()))
    engine = engine_with(subject, remote)
    places = range(len(CASES))
    states = subject.states(places)
    for index, state in zip(places, states, strict=True):
        engine.add(state, subject.adapters.denoiser if index == WITH_LORA else None)
    num_steps, late, ended = 0, 0, {}
    while len(engine):
        remote.is_slow = num_steps % 3 != 2
        report = engine.step()
        num_steps += 1
        assert not report.failed
        late += len(report.late)
        ended |= {state.request.request_id: num_steps for state in report.finished}
        if num_steps % 2 == 0:
            remote.answer()
    errors = [
        difference(state.latents, subject.expected[index])
        for index, state in zip(places, states, strict=True)
    ]
    assert max(errors) <= RUN_TOLERANCE, errors
    assert late >= 8
    # a call more than its steps: its sampler is pndm
    assert ended["r2"] == subject.requests[2].num_steps + 1
    # nothing that was late is asked for twice
    calls = [len(CASES[index]) * (subject.requests[index].num_steps + 1) for index in places]
    assert remote.num_asked <= sum(calls)


@torch.inference_mode()
def test_a_row_that_waits_is_left_out_of_steps(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControls(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0, 2]):
        engine.add(state)
    assert engine.step().late == ("r0",)
    assert not engine.is_waiting
    report = engine.step()
    assert (report.stepped, report.late) == (("r2",), ())
    engine.abort("r2")
    assert engine.is_waiting
    assert engine.step().stepped == ()
    remote.answer()
    assert not engine.is_waiting
    assert engine.step().stepped == ("r0",)


@torch.inference_mode()
def test_a_row_without_an_answer_fails_alone(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControls(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0, 2]):
        engine.add(state)
    engine.step()
    remote.answer(RequestFailed("nobody serves it", "control"))
    report = engine.step()
    assert [str(row.error) for row in report.failed] == ["control: nobody serves it"]
    assert report.stepped[-1] == "r2"
    assert remote.forgotten == ["r0/0"]


@torch.inference_mode()
def test_an_aborted_row_needs_no_answer(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControls(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0]):
        engine.add(state)
    engine.step()
    engine.abort("r0")
    remote.answer()
    # the same request may come back
    for state in subject.states([0]):
        engine.add(state)
    remote.is_slow = False
    while len(engine):
        engine.step()


def test_some_run_here_and_some_elsewhere(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks()
    here = LocalControls({"0": banks["0"]})
    elsewhere = LocalControls({"1": banks["1"], "2": banks["2"]})
    assert max(subject.errors(SplitControls(here, elsewhere, frozenset("0")))) <= RUN_TOLERANCE


# --- what is refused ---


def test_a_row_without_its_maps_is_refused(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    engine = engine_with(subject, LocalControls({}))
    [state] = subject.states([0])
    with pytest.raises(ValueError, match="'r0' has 1 ControlNets and 0 maps"):
        engine.add(replace(state, maps=()))


def test_a_culprit_fails_alone(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    controls = LocalControls(subject.banks())
    engine = engine_with(subject, controls)
    with torch.inference_mode():
        good, bad = subject.states([0, 5])
        bad.maps = (torch.zeros(8, 8, 3, dtype=torch.uint8), bad.maps[1])
        engine.add(good)
        engine.add(bad)
        failed = []
        while len(engine):
            failed += engine.step().failed
    assert [row.state.request.request_id for row in failed] == ["r5"]
    assert difference(good.latents, subject.expected[0]) <= RUN_TOLERANCE


def test_controlnets_of_other_models_are_refused(
    subjects: Callable[[str], Subject], zoo: Zoo
) -> None:
    config = controlnet_config(subjects("sd15").paths[0])
    unet = dict(zoo.reference("sd15").pipeline.unet.config) | {
        "_class_name": "UNet2DConditionModel"
    }
    check_base("edges", config, "m", unet, 4)
    with pytest.raises(ModelUnsupported, match=r"edges .* base m: maps scaled down by 4 against"):
        check_base("edges", config, "m", unet, 8)
    other = unet | {"block_out_channels": (32, 64)}
    with pytest.raises(ModelUnsupported, match="block_out_channels"):
        check_base("edges", config, "m", other, 4)
    with pytest.raises(ModelUnsupported, match="no UNet"):
        check_base("edges", config, "m", {"_class_name": "FluxTransformer2DModel"}, 4)
