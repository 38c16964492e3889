"""LoRA, ControlNets and edits in one request, beside requests with others of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.models.loading import encode_images, start_states
from ray_cluster.requests import AddOns, ControlNetUse, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.controlled import Subject, engine_with, use
from tests.engine.edits import EditReference, aligned_mask, edit_pixels, edit_request, template
from tests.engine.harness import RUN_TOLERANCE, difference
from tests.engine.random_controlnets import random_map

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

SIZE = (96, 64)
# strength, with a mask, ControlNets, with the LoRA, sampler, guidance
Case = tuple[float, bool, tuple[ControlNetUse, ...], bool, str, float]
CASES: tuple[Case, ...] = (
    (0.6, True, (use("2", start=0.3, end=0.7),), True, "ddim", 3.0),
    (1.0, True, (use("0"), use("1", scale=0.5)), True, "euler", 3.0),
    (0.6, False, (use("1", scale=0.7),), True, "dpmpp_2m", 3.0),
    (0.5, True, (use("0", end=0.5),), False, "euler_ancestral", 3.0),
    (0.6, False, (use("0"),), False, "ddim", 1.0),
    (0.6, True, (), True, "ddim", 3.0),
)


class Mixed:
    """A model with ControlNets and a LoRA, and what diffusers makes of each case alone."""

    def __init__(self, zoo: Zoo, folder: Any) -> None:
        self.subject = Subject(zoo, "sd15", folder)
        self.requests = [self._request(place) for place in range(len(CASES))]
        self.pixels = [
            edit_pixels(template(SIZE, place), aligned_mask(SIZE, 4) if masked else None)
            for place, (_, masked, *_rest) in enumerate(CASES)
        ]
        base = self.subject.reference.pipeline
        try:
            base.load_lora_weights(self.subject.lora, adapter_name="one")
            self.expected = [self._expected(place) for place in range(len(CASES))]
        finally:
            base.unload_lora_weights()

    def _request(self, place: int) -> ImageRequest:
        strength, masked, uses, _, sampler, guidance = CASES[place]
        one = edit_request(
            f"r{place}",
            strength=strength,
            masked=masked,
            width_px=SIZE[0],
            height_px=SIZE[1],
            num_steps=6,
            guidance_scale=guidance,
            sampler=sampler,
            seed=place,
            prompt="red " * (place + 1),
        )
        return replace(one, add_ons=AddOns(controls=uses))

    def maps(self, place: int) -> list[Any]:
        return [random_map(10 * place + one, *SIZE) for one in range(len(CASES[place][2]))]

    def _expected(self, place: int) -> torch.Tensor:
        subject, one, uses = self.subject, self.requests[place], CASES[place][2]
        base = subject.reference.pipeline
        (base.enable_lora if CASES[place][3] else base.disable_lora)()
        reference, options = EditReference(subject.reference), {}
        if uses:
            kind = "Inpaint" if CASES[place][1] else "Img2Img"
            reference._pipeline = getattr(diffusers, f"StableDiffusionControlNet{kind}Pipeline")(
                **base.components, controlnet=[subject.nets[int(each.name)] for each in uses]
            )
            options = {
                "control_image": [Image.fromarray(array) for array in self.maps(place)],
                "controlnet_conditioning_scale": [each.scale for each in uses],
                "control_guidance_start": [each.start for each in uses],
                "control_guidance_end": [each.end for each in uses],
            }
        return reference.latents(one, self.pixels[place], **options)

    @torch.inference_mode()
    def errors(self, places: Sequence[int]) -> list[float]:
        """How far cases are off that run together."""
        subject, states = self.subject, []
        engine = engine_with(subject, LocalControlNets(subject.banks()))
        for place in places:
            own = subject.adapters if CASES[place][3] else None
            (state,) = start_states(
                subject.model,
                [self.requests[place]],
                now_s=0.0,
                latents=[SentLatents(*encode_images(subject.model, [self.pixels[place]]))],
                deltas=[None if own is None else own.prompts],
            )
            state = replace(state, maps=tuple(map(torch.from_numpy, self.maps(place))))
            engine.add(state, None if own is None else own.denoiser)
            states.append(state)
        while len(engine):
            assert not engine.step().failed
        return [
            difference(state.latents, self.expected[place])
            for place, state in zip(places, states, strict=True)
        ]


@pytest.fixture(scope="module")
def mixed(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return Mixed(zoo, tmp_path_factory.mktemp("mixed"))


def test_all_together_equal_diffusers_one_by_one(mixed: Mixed) -> None:
    errors = mixed.errors(range(len(CASES)))
    assert len(errors) == len(CASES)
    assert max(errors) <= RUN_TOLERANCE, errors


def test_so_does_each_alone(mixed: Mixed) -> None:
    for place in range(len(CASES)):
        (error,) = mixed.errors([place])
        assert error <= RUN_TOLERANCE, place
