"""Whole runs with LoRAs beside edits and inpainting, and with alphas of each layer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraFactors, read_lora
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.models.loading import LoadedModel, encode_images, start_states
from ray_cluster.requests import ImageRequest
from tests.engine.conftest import DITS, Zoo
from tests.engine.edits import EditReference, aligned_mask, edit_pixels, edit_request, template
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    difference,
    engine_of,
    request,
)
from tests.engine.random_loras import ATTENTION, OF_ENCODER, Pairs, kohya_keys, pairs, save_loras
from tests.engine.reference import Reference

# peft, of the reference that has several
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Record = Callable[[str, object], None]
Case = dict[int, float]
INPAINTING = ("inpaint", "fill")
SIZES = ((64, 64), (96, 64), (64, 128), (64, 64))
SAMPLERS = ("ddim", "euler", "dpmpp_2m", "euler_ancestral")


def made(
    model: LoadedModel,
    requests: Sequence[ImageRequest],
    sets: Sequence[AdapterSet | None],
    pixels: Sequence[Any] = (),
) -> list[Tensor]:
    """The latents of requests that run together, each with its LoRAs."""
    engine = engine_of(model)
    prompts = [None if one is None else one.prompts for one in sets]
    with torch.inference_mode():
        images = [None if one is None else encode_images(model, [one])[0] for one in pixels]
        latents = list(map(SentLatents, images or [None] * len(requests)))
        states = start_states(model, requests, now_s=0.0, latents=latents, deltas=prompts)
        for state, own in zip(states, sets, strict=True):
            engine.add(state, None if own is None else own.denoiser)
        while len(engine):
            assert not engine.step().failed
    return [state.latents for state in states]


def bound(model: LoadedModel, loras: Sequence[LoraFactors], case: Case) -> AdapterSet | None:
    chosen = [(loras[index], scale) for index, scale in case.items()]
    return bind_adapters(model, chosen) if chosen else None


@contextmanager
def loaded(pipeline: Any, files: Sequence[Path]) -> Iterator[Callable[[Case], None]]:
    """Load files into a pipeline; yield what makes some of them count."""

    def choose(case: Case) -> None:
        if not case:
            pipeline.disable_lora()
            return
        pipeline.enable_lora()
        pipeline.set_adapters([str(index) for index in case], list(case.values()))

    try:
        for index, path in enumerate(files):
            pipeline.load_lora_weights(path, adapter_name=str(index))
        yield choose
    finally:
        pipeline.unload_lora_weights()


@pytest.mark.parametrize("name", ["inpaint", "sd15", "sdxl", "sd3", "flux", "fill"])
def test_edits_with_loras_beside_plain_requests_are_those_of_the_pipelines(
    zoo: Zoo, tmp_path: Path, name: str, record: Record
) -> None:
    """All rows differ in LoRAs, size, sampler and guidance; an inpainting UNet has 9 channels."""
    model, reference = zoo.model(name), zoo.reference(name)
    files = save_loras(reference.pipeline, tmp_path, 3)
    loras = [read_lora(path, zoo.folder(name)) for path in files]
    cases: list[Case] = [{0: 1.0}, {}, {1: 0.7, 2: -0.5}, {0: 0.5, 1: 0.4, 2: 0.3}]
    kinds = [(1.0, True), (0.6, name in INPAINTING), (0.5, True), None]
    requests: list[ImageRequest] = []
    pixels: list[Any] = []
    for index, (kind, (width, height)) in enumerate(zip(kinds, SIZES, strict=True)):
        options: dict[str, Any] = {
            "sampler": "flow_match_euler" if name in (*DITS, "fill") else SAMPLERS[index],
            "prompt": "red " * (index + 1),
            "num_steps": 5 + index,
            "guidance_scale": (3.0, 1.0)[index % 2],
            "width_px": width,
            "height_px": height,
            "seed": index,
        }
        if kind is None and name not in INPAINTING:
            requests.append(request(f"r{index}", **options))
            pixels.append(None)
            continue
        strength, masked = kind or (0.8, True)
        one = edit_request(f"r{index}", strength=strength, masked=masked, **options)
        mask = aligned_mask(one.size_px, 4) if masked else None
        requests.append(one)
        pixels.append(edit_pixels(template(one.size_px, index), mask))
    expected = []
    with loaded(reference.pipeline, files) as choose:
        for one, own, case in zip(requests, pixels, cases, strict=True):
            choose(case)
            if own is None:
                expected.append(reference._latents([one])[0])
            else:
                expected.append(EditReference(reference).latents(one, own))
    sets = [bound(model, loras, case) for case in cases]
    together = made(model, requests, sets, pixels)
    errors = [difference(*pair) for pair in zip(together, expected, strict=True)]
    record("together", max(errors))
    assert max(errors) <= RUN_TOLERANCE
    alone = made(model, requests[2:3], sets[2:3], pixels[2:3])
    assert difference(alone[0], expected[2]) <= RUN_TOLERANCE
    # each with the LoRAs of the next row
    others = made(model, requests, sets[1:] + sets[:1], pixels)
    wrong = [difference(*pair) for pair in zip(others, expected, strict=True)]
    assert min(wrong) >= CONTROL_FACTOR * RUN_TOLERANCE


@contextmanager
def merged(
    reference: Reference, layers: dict[str, Pairs], alphas: dict[str, dict[str, float]]
) -> Iterator[None]:
    """Have the pipeline's weights be those with a LoRA in them, computed by the formula."""
    pipeline = reference.pipeline
    plain = {name: getattr(pipeline, name) for name in layers}
    try:
        for name, model in plain.items():
            changed = copy.deepcopy(model)
            for path, (down, up) in layers[name].items():
                scale = alphas[name][path] / down.shape[0]
                weight = changed.get_submodule(path).weight
                weight.data += scale * torch.tensordot(up.flatten(1), down, 1)
            setattr(pipeline, name, changed)
        yield
    finally:
        for name, model in plain.items():
            setattr(pipeline, name, model)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_locon_file_whose_layers_differ_in_rank_and_alpha_is_the_merged_model(
    zoo: Zoo, tmp_path: Path, name: str, record: Record
) -> None:
    """As diffusers would load it most alphas would be the commonest: merged by hand instead."""
    model, reference = zoo.model(name), zoo.reference(name)
    parts = {"unet": ("lora_unet", (*ATTENTION, "conv1", "conv2", "proj_in"))}
    if name == "sdxl":
        parts["text_encoder"] = ("lora_te1_text_model", OF_ENCODER)
        parts["text_encoder_2"] = ("lora_te2", OF_ENCODER)
    else:
        parts["text_encoder"] = ("lora_te_text_model", OF_ENCODER)
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Pairs] = {}
    alphas: dict[str, dict[str, float]] = {}
    for component, (prefix, endings) in parts.items():
        layers[component], alphas[component] = {}, {}
        for rank, ending in enumerate(endings, 2):
            some = pairs(getattr(reference.pipeline, component), (ending,), rank, rank, 0.5)
            for index, (path, pair) in enumerate(some.items()):
                alphas[component][path] = 0.3 * rank * (1 + index % 3)
                tensors |= kohya_keys(prefix, {path: pair}, alphas[component][path])
            layers[component] |= some
    path = tmp_path / "locon.safetensors"
    save_file({key: one.contiguous() for key, one in tensors.items()}, path)
    own = bind_adapters(model, [(read_lora(path, zoo.folder(name)), 1.0)])
    requests = [
        request("a", sampler="euler", num_steps=4, seed=3),
        request("b", sampler="ddim", num_steps=5, width_px=96, guidance_scale=1.0),
        request("c", sampler="dpmpp_2m", num_steps=3, prompt="blue"),
    ]
    with merged(reference, layers, alphas):
        expected = [reference._latents([one])[0] for one in (requests[0], requests[2])]
    expected.insert(1, reference._latents([requests[1]])[0])
    found = made(model, requests, [own, None, own])
    errors = [difference(*pair) for pair in zip(found, expected, strict=True)]
    record("merged", max(errors))
    assert max(errors) <= RUN_TOLERANCE
    # alphas ignored; all layers with one alpha
    for wrong in ({}, {0: 1.0}):
        ignored = {
            part: {path: 1.0 if wrong else float(down.shape[0]) for path, (down, _) in some.items()}
            for part, some in layers.items()
        }
        with merged(reference, layers, ignored):
            other = reference._latents([requests[0]])[0]
        assert difference(found[0], other) >= CONTROL_FACTOR * RUN_TOLERANCE
