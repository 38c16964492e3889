"""Requests with ControlNets that differ in all they can, and what diffusers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ControlNetModel
from PIL import Image
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.engine.controlnets.bank import ControlNetBank
from ray_cluster.engine.controlnets.loading import load_controlnet
from ray_cluster.engine.controlnets.source import ControlNetResiduals
from ray_cluster.engine.models.loading import start_states
from ray_cluster.engine.step.mixed_step import StepSources
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    all_rows,
    difference,
    request,
)
from tests.engine.random_controlnets import random_map, save_controlnets
from tests.engine.random_loras import save_loras
from tests.engine.reference import DIFFUSERS_BY_SAMPLER

Record = Callable[[str, object], None]

_NONE = BlobRef("", 0)
PIPELINES = {
    "sd15": "StableDiffusionControlNetPipeline",
    "shapes": "StableDiffusionControlNetPipeline",
    "sdxl": "StableDiffusionXLControlNetPipeline",
}


def use(name: str, **changes: Any) -> ControlNetUse:
    return ControlNetUse(name, _NONE, **changes)


# by row its ControlNets; the fourth row has a LoRA too
CASES: tuple[tuple[ControlNetUse, ...], ...] = (
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
        self.lora = lora

    @cached_property
    def expected(self) -> list[Tensor]:
        base = self.reference.pipeline
        try:
            base.load_lora_weights(self.lora, adapter_name="one")
            return [self._expected(index) for index in range(len(CASES))]
        finally:
            base.unload_lora_weights()

    def _expected(self, index: int) -> Tensor:
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

    def banks(self, max_bytes: int = 1 << 30) -> dict[str, ControlNetBank]:
        device = torch.device("cpu")
        return {
            str(index): ControlNetBank(load_controlnet(str(path), device), max_bytes=max_bytes)
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
    source = ControlNetResiduals(controls, clock)
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
