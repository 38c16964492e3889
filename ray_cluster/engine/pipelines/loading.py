"""From a pool's configuration to a pipeline of diffusers that can be called."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import ProcessorMixin
from transformers.utils import is_torchvision_available

from ray_cluster.compat import processor_without_torchvision
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.device.gpu import prepare_card, this_card, worker_device
from ray_cluster.engine.files.folders import (
    component_config,
    component_names,
    denoiser_name,
    pipeline_name,
    resolve_folder,
)
from ray_cluster.engine.models.loading import number_type
from ray_cluster.engine.models.whole_models import check_transformer, load_models
from ray_cluster.engine.pipelines.classes import MULTIPLES, PipelineFacts, pipeline_facts
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.errors import MODEL_ERRORS, ConfigError, MemoryRefused
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.models.checkpoints.quantised import check_quantised, quantised_components
from ray_cluster.models.json_files import read_object
from ray_cluster.models.local import ModelSizes, check_sides, vae_scale_factor
from ray_cluster.models.prompt_tokens import packed, too_long
from ray_cluster.models.sampling import max_noise_steps, nearest_sampler
from ray_cluster.models.weight_files import INDEX, UNUSED, check_files, components, weight_files
from ray_cluster.policies.costs.gpu_shares import replica_bytes
from ray_cluster.policies.costs.memory import MemoryPlan
from ray_cluster.policies.edits import SizePx
from ray_cluster.process.machine import loading_a_model
from ray_cluster.requests import ImageRequest, ModelProfile, PromptTokenizer, size_of

logger = logging.getLogger(__name__)

# models that rewrite prompts, which is switched off
_REWRITERS = ("pe", "pe_tokenizer")
# of each picture, to which pipelines scale larger ones down themselves
SEEN_PX = 1024 * 1024
# of a pipeline that does not say
_SIDE_PX, _MAX_TOKENS, _FACTOR = 1024, 512, 8
# patches of two latent pixels, where nothing else is known
_LEAST_MULTIPLE_PX = 16
_AUTOENCODERS = ("vae", "movq", "vqvae")
# where pipelines keep what their calls do not say
_MOST_TOKENS = ("tokenizer_max_length", "default_max_sequence_length")
# a tokenizer without a limit of its own has some astronomic number
_UNLIMITED = 1_000_000

OnStep = Callable[[], None]
"""Called at the end of each step; what it raises ends the call."""


@dataclass(frozen=True, slots=True)
class InspectedPipeline:
    """What a folder says of a pipeline, before any weight is loaded.

    Attributes:
        profile: what it accepts, but for the length of its prompts.
        weight_bytes: of all its models, in the pool's number format.
    """

    folder: Path
    facts: PipelineFacts
    profile: ModelProfile
    weight_bytes: int
    sampling_words: str

    @property
    def memory(self) -> MemoryPlan:
        """What is known before a call: weights; the first call at the largest size tells all."""
        profile, weights = self.profile, self.weight_bytes
        sizes = {(profile.default_width_px, profile.default_height_px): 1}
        words = f"{weights / 2**30:.2f} GiB of weights; its first call is {largest_call(profile)}"
        return MemoryPlan("fits", "nothing", sizes, weights, 0, weights, words)

    @property
    def words(self) -> str:
        """How it is run, for people."""
        return (
            f"run by diffusers' {self.facts.name} call by call (engine: diffusers), one image at a "
            f"time, which starts over when it is stopped; {self.sampling_words}"
        )


def largest_call(profile: ModelProfile) -> str:
    """Return what a model is tried with at its start, for people."""
    side = profile.max_px // profile.size_multiple_px * profile.size_multiple_px
    count = profile.max_references
    pictures = f" from {count} picture{'s' * (count > 1)}" if count else ""
    return f"one of the largest size, {side}x{side}{pictures}"


def inspect_pipeline(pool: PoolConfig) -> InspectedPipeline:
    """Read what the files of a pool's pipeline say; a hub model is downloaded.

    Raises:
        ConfigError: the model cannot be found or is not whole, or the pool's sizes do not suit it.
        ModelUnsupported: its pipeline makes no images from text.
        MemoryRefused: its weights are more than ``memory_gib``.
    """
    folder = resolve_folder(*pool.files)
    facts = pipeline_facts(pipeline_name(folder), read_object(folder / INDEX))
    check_files(folder)
    check_quantised(folder, pool.device)
    if pool.transformer is not None:
        check_transformer(folder)
    scheduler = _config(folder, "scheduler")
    sampler = nearest_sampler(str(scheduler.get("_class_name")))
    sizes, defaults, own = _sizes(pool, folder, facts), pool.defaults, facts.default_scale
    steps = defaults.num_inference_steps or int(facts.defaults["num_inference_steps"])
    scale = own if defaults.guidance_scale is None else defaults.guidance_scale
    profile = ModelProfile(
        model=pool.model_name,
        family=facts.name.removesuffix("Pipeline"),
        size_multiple_px=sizes.multiple_px,
        min_px=sizes.min_px,
        max_px=sizes.max_px,
        default_width_px=sizes.default_width_px,
        default_height_px=sizes.default_height_px,
        default_num_steps=steps,
        default_guidance_scale=scale,
        default_sampler=sampler,
        max_steps_by_sampler={sampler: _max_steps(pool, scheduler)},
        max_prompt_tokens=facts.max_tokens or _MAX_TOKENS,
        created_s=int((folder / INDEX).stat().st_mtime),
        guidance=facts.guidance.kind,
        edits="none" if facts.edits is None else "any",
        engine="diffusers",
    )
    profile = _looking(profile, facts, pool)
    if profile.guidance == "none" and scale > 1:
        raise ConfigError(
            f"pool {pool.name}: defaults.guidance_scale is {scale:g}, but this model is made to do "
            "without guidance; leave it out"
        )
    words = (
        f"the folder's own {scheduler.get('_class_name')} (`{sampler}` at the API), {steps} steps, "
        f"guidance {scale:g}; what defaults leave out is from {facts.name}"
    )
    weight_bytes = _weight_bytes(pool, folder)
    _have_room(pool, weight_bytes, pool.memory_bytes)
    return InspectedPipeline(folder, facts, profile, weight_bytes, words)


def _have_room(pool: PoolConfig, weight_bytes: int, limit: int | None) -> bool:
    """Whether weights fit; MemoryRefused if they do not and no part of them can be elsewhere."""
    fits = limit is None or weight_bytes < limit
    if not fits and (pool.device == "cpu" or pool.offload == "never"):
        raise MemoryRefused(
            f"pool {pool.name}: {weight_bytes / 2**30:.2f} GiB of weights, and memory for "
            f"{(limit or 0) / 2**30:.2f} GiB: raise memory_gib"
            + ("" if pool.device == "cpu" else ", or set offload: auto")
        )
    return fits


def _max_steps(pool: PoolConfig, scheduler: Mapping[str, Any]) -> int:
    """Return the most steps of a call; flow matching has times of any number."""
    most, name = pool.max_num_inference_steps, str(scheduler.get("_class_name"))
    if name.startswith("FlowMatch") or "num_train_timesteps" not in scheduler:
        return most
    return min(most, max_noise_steps(scheduler, nearest_sampler(name)))


def _looking(profile: ModelProfile, facts: PipelineFacts, pool: PoolConfig) -> ModelProfile:
    """Return a model's profile with the pictures that it looks at."""
    looks, wanted = facts.looks, pool.max_references
    most = 16 if looks is not None and looks.is_list else int(looks is not None)
    least = int(looks is not None and looks.are_needed)
    if wanted is not None and not least <= wanted <= most:
        raise ConfigError(
            f"pool {pool.name}: max_references is {wanted}; {facts.name} takes {least} to {most}"
        )
    if looks is None:
        return profile
    most_px = max(profile.max_px, looks.min_side_px) ** 2
    return replace(
        profile,
        max_references=looks.most if wanted is None else wanted,
        max_masked_references=1 + facts.most_beside_edit,
        min_references=least,
        max_reference_px=SEEN_PX if looks.is_fixed else min(SEEN_PX, most_px),
        min_reference_px=SEEN_PX if looks.is_fixed else 0,
        min_reference_side_px=looks.min_side_px,
        max_reference_ratio=looks.max_ratio,
    )


def _sizes(pool: PoolConfig, folder: Path, facts: PipelineFacts) -> ModelSizes:
    denoiser, names = _config(folder, denoiser_name(folder)), component_names(folder)
    coder = next((one for one in _AUTOENCODERS if one in names), None)
    try:
        factor = 1 if coder is None else vae_scale_factor(_config(folder, coder))
    except LookupError:
        factor = _FACTOR
    patch = denoiser.get("patch_size")
    own = factor * (patch if isinstance(patch, int) else 2)
    multiple = math.lcm(own, MULTIPLES.get(facts.name, 1), _LEAST_MULTIPLE_PX)
    side, sample = facts.defaults["height"], denoiser.get("sample_size")
    if coder is None and not isinstance(side, int):
        # in pixels
        side = read_object(folder / INDEX).get("default_sample_size")
    if not isinstance(side, int):
        side = sample * factor if isinstance(sample, int) else _SIDE_PX
    width, height = (side, side) if pool.defaults.size is None else size_of(pool.defaults.size)
    largest = pool.max_px or 2 * max(width, height)
    # positions of patches, a square of them, or of latent pixels
    if pool.max_px is None and denoiser.get("_class_name") == "AuraFlowTransformer2DModel":
        positions = math.isqrt(denoiser["pos_embed_max_size"]) * denoiser["patch_size"]
        largest = min(largest, positions * factor)
    elif pool.max_px is None and "max_resolution" in denoiser:
        largest = min(largest, denoiser["max_resolution"][0] * factor)
    found = ModelSizes(multiple, pool.min_px or multiple, largest, width, height)
    check_sides(pool, found)
    return found


def _config(folder: Path, component: str) -> dict[str, Any]:
    """Return a component's configuration; empty for one that the pipeline has not."""
    has_it = component in component_names(folder)
    return component_config(folder, component) if has_it else {}


def _weight_bytes(pool: PoolConfig, folder: Path) -> int:
    # on a GPU that is not known it is one of two formats of half precision
    each = 4 if pool.number_format() == "float32" else 2
    found = [weight_files(folder, one) for one in components(folder) if one.has_weights]
    quantised = quantised_components(folder)
    total = 0
    for files in found:
        if files.is_gguf or files.paths[0].parent.name in quantised:
            total += sum(path.stat().st_size for path in files.paths)
        elif not files.is_pickled:
            total += each * sum(map(math.prod, files.shapes().values()))
    return total


class CalledPipeline:
    """A loaded pipeline; one thread calls it, one image at a time.

    Args:
        pipeline: of diffusers.
        limits: its tokenizers that count, with the most tokens of a prompt.

    Attributes:
        profile: what it accepts.
        memory_words: how it was loaded, for people.
    """

    def __init__(
        self,
        inspected: InspectedPipeline,
        pipeline: Any,
        device: torch.device,
        limits: list[tuple[Any, int]],
        memory_words: str,
        *,
        is_offloaded: bool = False,
    ) -> None:
        self.facts, self.device = inspected.facts, device
        self.memory_words, self.words = memory_words, inspected.words
        self.profile = replace(
            inspected.profile,
            max_prompt_tokens=min((most for _, most in limits), default=_MAX_TOKENS),
        )
        self._limits = limits
        self._pipelines = {one: _as_other(pipeline, one) for one in self.facts.edits or ()}
        self._pipelines[self.facts.kind] = self._last = pipeline
        self._is_offloaded = is_offloaded
        self._schedulers = {kind: _schedulers(one) for kind, one in self._pipelines.items()}

    @property
    def tokenizers(self) -> tuple[PromptTokenizer, ...]:
        """Those that count, for processes without the model; none if they need Python."""
        if not all(hasattr(one, "backend_tokenizer") for one, _ in self._limits):
            return ()
        return tuple(packed(one.backend_tokenizer.to_str(), most) for one, most in self._limits)

    def check_prompts(self, request: ImageRequest) -> None:
        """Refuse a prompt that the pipeline would cut without a word.

        Raises:
            InvalidRequest: with the numbers.
        """
        texts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt or ""}
        for tokenizer, most in self._limits:
            for param, text in texts.items():
                count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
                if count > most:
                    raise too_long(param, count, most)

    def make(
        self, request: ImageRequest, on_step: OnStep, sent: SentPixels | None = None
    ) -> Pixels:
        """Make a request's image, ``[H, W, 3]`` uint8, as the pipeline alone would.

        Args:
            sent: the images that it is made from.

        Raises:
            ArithmeticError: the image became NaN or infinite.
            ValueError: the pipeline made no such image.
        """
        sent = sent or SentPixels()
        pipeline = self._pipelines[kind := self.facts.class_of(sent)]
        if self._is_offloaded and pipeline is not self._last:
            # whose turn it is to be on the GPU is each pipeline's own order of its models
            pipeline.enable_model_cpu_offload(device=self.device)
        self._last = pipeline
        # a scheduler is state, and what breaks a call off leaves it in the middle
        for name, one in self._schedulers[kind].items():
            setattr(pipeline, name, copy.deepcopy(one))
        self.facts.set_size(pipeline, request)
        arguments = self.facts.arguments(request, sent)
        if self.facts.callback is not None:
            arguments[self.facts.callback] = _callback(on_step)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        try:
            images = pipeline(**arguments, generator=generator)[0]
        finally:
            # of offloading; a call that is broken off does not come to it
            pipeline.maybe_free_model_hooks()
        return _as_pixels(np.asarray(images[0]), request.size_px, is_edit=sent.edit is not None)


def _as_pixels(image: Any, size_px: SizePx, *, is_edit: bool) -> Pixels:
    """Return what a pipeline made as diffusers makes pictures of it.

    Edits that it makes at a size of its own, about a megapixel, are scaled.
    """
    if image.shape[-1] == 4:
        # on white, as all that is transparent here
        image = image[..., :3] * image[..., 3:] + (1 - image[..., 3:])
    is_size = is_edit or image.shape[:2] == size_px[::-1]
    if image.ndim != 3 or image.shape[-1] != 3 or not is_size or image.dtype.kind != "f":
        raise ValueError(f"the pipeline made {image.shape} of {image.dtype}, no image")
    if not np.isfinite(image).all():
        raise ArithmeticError("the image became NaN or infinite")
    made: Pixels = (image * 255).round().astype(np.uint8)
    if made.shape[:2] == size_px[::-1]:
        return made
    return np.asarray(Image.fromarray(made).resize(size_px, Image.Resampling.LANCZOS))


def _callback(on_step: OnStep) -> Callable[..., Any]:
    def at_end(*given: Any) -> Any:
        on_step()
        # what a callback of the newer kind may change; the older kind's result is nobody's
        return given[-1]

    return at_end


@loading_a_model()
def load_pipeline(pool: PoolConfig) -> CalledPipeline:
    """Load the pipeline of a pool, if its weights have room.

    Raises:
        ConfigError, ModelUnsupported: see :func:`inspect_pipeline`.
        MemoryRefused: its weights do not fit.
    """
    inspected = inspect_pipeline(pool)
    device = worker_device(pool)
    card = this_card() if device.type == "cuda" else None
    dtype = number_type(pool, card)
    limit = pool.memory_bytes
    if card is not None:
        prepare_card(pool, card, dtype)
        limit = replica_bytes(card, pool.num_gpus, pool.memory_bytes)
    fits = _have_room(pool, inspected.weight_bytes, limit)
    pipeline = _from_folder(inspected, dtype)
    if fits:
        pipeline.to(device)
    else:
        pipeline.enable_model_cpu_offload(device=device)
    words = inspected.memory.explanation + ("" if fits else "; one model on the GPU at a time")
    logger.info("pool %s: %s on %s; %s; %s", pool.name, dtype, device, words, inspected.words)
    limits = _limits(pipeline, inspected.facts)
    return CalledPipeline(inspected, pipeline, device, limits, words, is_offloaded=not fits)


def _schedulers(pipeline: Any) -> dict[str, Any]:
    parts = pipeline.components.items()
    return {name: one for name, one in parts if isinstance(one, diffusers.SchedulerMixin)}


def _as_other(pipeline: Any, kind: type[Any]) -> Any:
    """Return a pipeline of another class, of the same components and settings.

    Of schedulers it has copies: some classes set them up for themselves.
    """
    taken = inspect.signature(kind.__init__).parameters.keys() - pipeline.components.keys()
    settings = {name: pipeline.config[name] for name in taken & pipeline.config.keys()}
    parts = pipeline.components | copy.deepcopy(_schedulers(pipeline))
    if kind.__name__ == "ChromaInpaintPipeline":
        # it asks for what only FLUX's transformer says, and makes nothing of the answer
        parts["transformer"].register_to_config(guidance_embeds=False)
    other = kind(**parts, **settings)
    other.set_progress_bar_config(disable=True)
    return other


def _processors(folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processors of a folder that cannot be loaded without torchvision."""
    found = {}
    for name, value in index.items():
        if (
            isinstance(value, list)
            and value[0] == "transformers"
            and not is_torchvision_available()
        ):
            kind = processor_without_torchvision(value[1])
            if kind is not None:
                found[name] = kind.from_pretrained(folder / name, local_files_only=True)
    return found


def _from_folder(inspected: InspectedPipeline, dtype: torch.dtype) -> Any:
    folder, facts = inspected.folder, inspected.facts
    taken = inspect.signature(facts.kind.__init__).parameters
    index = read_object(folder / INDEX)
    # checkers are for others to run; rewriters and watermarks change what was asked for
    extra: dict[str, Any] = dict.fromkeys({*UNUSED, *_REWRITERS} & index.keys() & taken.keys())
    off = ("requires_safety_checker", "add_watermarker")
    extra |= {name: False for name in off if name in taken}
    models = {one.name: weight_files(folder, one) for one in components(folder) if one.has_weights}
    if variant := next((one.variant for one in models.values() if one.variant), None):
        extra["variant"] = variant
    # what diffusers does not find by itself
    parts = {name for name, one in models.items() if one.part is not None}
    try:
        extra |= load_models(folder, dtype, only=parts) if parts else {}
        extra |= (found := _processors(folder, index))
        # those of which diffusers would want to see the class
        late = {name: one for name, one in found.items() if type(one).__base__ is ProcessorMixin}
        extra |= dict.fromkeys(late)
        pipeline = facts.kind.from_pretrained(folder, dtype=dtype, local_files_only=True, **extra)
        pipeline.register_modules(**late)
    except MODEL_ERRORS as error:
        raise ConfigError(f"{folder} cannot be loaded by diffusers: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
    return pipeline


def _limits(pipeline: Any, facts: PipelineFacts) -> list[tuple[Any, int]]:
    """Return the tokenizers of the encoder that reads most, with what it reads.

    Others beside it see the start of a long prompt, as they do in diffusers.
    """
    found = []
    parts = {name: one for name, one in pipeline.components.items() if one is not None}
    reading = [one for name, one in parts.items() if "tokenizer" in name]
    for part in reading or [one for one in parts.values() if isinstance(one, ProcessorMixin)]:
        one = getattr(part, "tokenizer", part)
        own = getattr(one, "model_max_length", _UNLIMITED)
        said = (facts.max_tokens, *(getattr(pipeline, key, None) for key in _MOST_TOKENS))
        reads = next(filter(None, said), own if own < _UNLIMITED else _MAX_TOKENS)
        most = min(reads, own)
        marks = one.num_special_tokens_to_add()
        if getattr(one, "chat_template", None):
            empty = [{"role": "user", "content": ""}]
            text = one.apply_chat_template(empty, tokenize=False, add_generation_prompt=True)
            marks = len(one(text)["input_ids"])
        found.append((one, most - marks))
    most = max((limit for _, limit in found), default=0)
    return [(one, limit) for one, limit in found if limit == most]
