"""From a pool's configuration to a model's stages: any folder of the families covered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError
from torch import Tensor, nn

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.batch.batch_caps import BatchCaps
from ray_cluster.engine.device.gpu import prepare_card, this_card, worker_device
from ray_cluster.engine.edits.template import (
    EncodedImage,
    SentLatents,
    latent_mask,
    pixel_mask,
)
from ray_cluster.engine.files.folders import (
    component_config,
    component_names,
    denoiser_name,
    pipeline_name,
    resolve_folder,
)
from ray_cluster.engine.files.memory import plan_model_memory
from ray_cluster.engine.files.prompt_limits import max_prompt_tokens
from ray_cluster.engine.files.weights import DTYPE_BY_NAME, vae_dtype
from ray_cluster.engine.models.denoisers import (
    build_executor,
    check_denoiser,
    edit_kind,
    flow_model,
    guidance_kind,
    is_flux,
    is_unet,
)
from ray_cluster.engine.models.offload import place_weights
from ray_cluster.engine.models.whole_models import check_models, load_models
from ray_cluster.engine.models.wide_layers import computing_dtype
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.stages.autoencoder import (
    Decodes,
    EncodesImages,
    ImageDecoder,
    ImageEncoder,
)
from ray_cluster.engine.stages.prompt_encoder import PipelineEncoder, PromptDeltas, PromptEncoder
from ray_cluster.engine.step.executor import Executor
from ray_cluster.engine.step.reuse_steps import check_reuse
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import (
    REQUEST_ERRORS,
    ConfigError,
    InvalidRequest,
    MemoryRefused,
    ModelUnsupported,
)
from ray_cluster.imaging.edit_images import EditPixels, SentPixels
from ray_cluster.models.fidelity_tables import step_table
from ray_cluster.models.json_files import read_object
from ray_cluster.models.local import (
    FAMILY_BY_PIPELINE,
    MAX_REFERENCES,
    check_group,
    check_sampler,
    check_schedules,
    max_reference_px,
    model_sizes,
    patch_size,
    vae_scale_factor,
)
from ray_cluster.models.sampling import FolderSampling, folder_sampling
from ray_cluster.models.weight_files import INDEX, T5_OF_SD3, UNUSED
from ray_cluster.policies.costs.gpu_shares import Card
from ray_cluster.policies.costs.memory import MemoryPlan, SizePx
from ray_cluster.policies.steps.reuse import num_outer_blocks
from ray_cluster.process.machine import loading_a_model
from ray_cluster.requests import ImageRequest, ModelProfile

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[Any, int, torch.device], Executor[Any, Any]]
"""Makes the executor of a denoiser, given image pixels per latent pixel and its device."""


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """What the files of a model say, before any weight is loaded.

    Attributes:
        profile: what the model accepts, for validation at the gateway.
        sampling: what the folder says of it, where the pool says nothing.
    """

    folder: Path
    tables: SamplerTables
    profile: ModelProfile
    sampling: FolderSampling

    @property
    def sizes(self) -> list[SizePx]:
        """For which memory is planned."""
        profile = self.profile
        default = (profile.default_width_px, profile.default_height_px)
        return sorted({default, (profile.max_px, profile.max_px)})

    @property
    def sampling_words(self) -> str:
        """How calls are sampled that say nothing, and where that comes from."""
        profile, own = self.profile, self.sampling
        words = (
            f"{profile.default_sampler}, {profile.default_num_steps} steps, guidance "
            f"{profile.default_guidance_scale:g}; what defaults leave out is from {own.origin}"
        )
        if not own.is_exact and profile.default_sampler == own.sampler:
            words += f", to whose method {own.sampler} is only the nearest"
        return words


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The stages of one model, ready to run.

    Attributes:
        profile: what the model accepts, for validation at the gateway.
        sampling_words: as of :class:`InspectedModel`.
        memory: the plan it was loaded under.
        max_batch_by_size: what that plan allows, for any size.
    """

    encoder: PromptEncoder
    images: EncodesImages
    executor: Executor[Any, Any]
    decoder: Decodes
    tables: SamplerTables
    profile: ModelProfile
    sampling_words: str
    memory: MemoryPlan
    max_batch_by_size: BatchCaps


def inspect_model(pool: PoolConfig) -> InspectedModel:
    """Find the model of a pool and read what its files say; a hub model is downloaded.

    Raises:
        ConfigError: the model cannot be found or is not whole, or the pool's sizes do not suit it.
        ModelUnsupported: its pipeline, UNet, transformer or scheduler is not covered.
    """
    folder = resolve_folder(*pool.files)
    family = _family(folder)
    model = component_config(folder, denoiser_name(folder))
    check_denoiser(model, pipeline_name(folder))
    check_models(folder)
    _check_fit(folder, model)
    scheduler = component_config(folder, "scheduler")
    tables = SamplerTables(scheduler, flow_model(folder))
    sampling = folder_sampling(pool.model, pipeline_name(folder), scheduler, guidance_kind(model))
    profile = _profile(pool, folder, family, tables, sampling)
    _check_schedule(folder, tables, profile)
    return InspectedModel(folder, tables, profile, sampling)


def plan_model(pool: PoolConfig, model: InspectedModel, card: Card | None = None) -> MemoryPlan:
    """Plan the memory of a pool's model, without loading a weight.

    Args:
        card: the GPU of a pool that runs on one; it may be left out if the pool names both its
            ``memory_gib`` and its ``dtype``.

    Raises:
        MemoryRefused: there is no room for it.
    """
    plan = plan_model_memory(model.folder, pool, model.sizes, number_type(pool, card), card)
    if plan.verdict == "refused":
        raise MemoryRefused(f"pool {pool.name}: {plan.explanation}")
    if pool.is_group and plan.offloaded == "all":
        raise MemoryRefused(
            f"pool {pool.name}: an image fits only with all weights offloaded, and ranks of a "
            "group keep the transformer on their devices: raise memory_gib, lower max_px, or set "
            f"ranks: 1 ({plan.explanation})"
        )
    logger.info("pool %s: memory %s", pool.name, plan.explanation)
    return plan


def number_type(pool: PoolConfig, card: Card | None) -> torch.dtype:
    """Return the number format of a pool's weights.

    Args:
        card: the GPU, if it runs on one that is known.
    """
    name = pool.number_format(None if card is None else card.capability)
    assert name is not None, "a pool on a GPU that is not known names its number format"
    return DTYPE_BY_NAME[name]


@loading_a_model()
def load_model(pool: PoolConfig, make: MakeExecutor | None = None) -> LoadedModel:
    """Plan the memory, hold this process to it, then load the model of a pool.

    Args:
        make: the executor; that of its family unless given.

    Raises:
        ConfigError, ModelUnsupported: see :func:`inspect_model`.
        MemoryRefused: see :func:`plan_model`.
    """
    model = inspect_model(pool)
    device = worker_device(pool)
    card = this_card() if device.type == "cuda" else None
    plan, dtype = plan_model(pool, model, card), number_type(pool, card)
    if card is not None:
        prepare_card(pool, card, dtype)
    logger.info("pool %s: sampling %s", pool.name, model.sampling_words)
    widened = "" if computing_dtype(dtype, device) is dtype else ", computed in float32,"
    name = str(dtype).removeprefix("torch.")
    logger.info("pool %s: %s%s on %s", pool.name, name, widened, device)
    pipeline = _load_pipeline(model.folder, dtype)
    place_weights(pipeline, device, plan.offloaded)
    denoiser = getattr(pipeline, denoiser_name(model.folder))
    executor = (make or build_executor)(denoiser, pipeline.vae_scale_factor, device)
    turn = threading.Lock()
    # it has replaced weights by others in its own order: what they took may be others' now
    torch.cuda.empty_cache()
    return LoadedModel(
        encoder=PipelineEncoder(pipeline, device),
        images=ImageEncoder(pipeline.vae, device, turn),
        executor=executor,
        decoder=ImageDecoder(pipeline.vae, device, turn),
        tables=model.tables,
        profile=model.profile,
        sampling_words=model.sampling_words,
        memory=plan,
        max_batch_by_size=BatchCaps(plan.max_batch_by_size),
    )


def encode_images(model: LoadedModel, edits: Sequence[EditPixels]) -> list[EncodedImage]:
    """Encode the images of edits of one size together.

    Raises:
        ArithmeticError: the autoencoder returned NaN or infinite latents.
    """
    device, factor = model.executor.device, model.images.factor
    images, masks = [one.work for one in edits], [one.mask for one in edits]
    latents = model.images.encode(images)
    if not model.executor.num_conditions:
        pooled = [None if one is None else latent_mask(one, factor).to(device) for one in masks]
        return list(map(EncodedImage, latents, pooled))
    # an inpainting model always sees a mask
    whole = [np.ones(one.shape[:2], np.bool_) for one in images]
    seen = [whole[index] if one is None else one for index, one in enumerate(masks)]
    spared = model.images.encode(images, seen)
    found = []
    for clean, mask, rest in zip(latents, seen, spared, strict=True):
        own = latent_mask(mask, factor).to(device)
        is_fine = model.executor.num_conditions > len(rest) + 1
        shown = pixel_mask(mask, factor).to(device) if is_fine else own
        found.append(EncodedImage(clean, own, torch.cat([shown.to(rest.dtype), rest])))
    return found


def encode_sent(model: LoadedModel, sent: Sequence[SentPixels]) -> list[SentLatents]:
    """Encode what requests are made from: edits of one size, and references of any.

    Raises:
        ArithmeticError: as of :func:`encode_images`.
    """
    edits = [one.edit for one in sent if one.edit is not None]
    seen = [picture for one in sent for picture in one.references]
    found: dict[int, Tensor] = {}
    for shape in dict.fromkeys(one.shape for one in seen):
        places = [place for place, one in enumerate(seen) if one.shape == shape]
        latents = model.images.encode([seen[place] for place in places])
        found |= dict(zip(places, latents, strict=True))
    images = iter(encode_images(model, edits) if edits else ())
    references = iter([found[place] for place in range(len(seen))])
    return [
        SentLatents(
            None if one.edit is None else next(images),
            tuple(islice(references, len(one.references))),
        )
        for one in sent
    ]


def start_states(
    model: LoadedModel,
    requests: Sequence[ImageRequest],
    *,
    now_s: float,
    latents: Sequence[SentLatents | None] = (),
    deltas: Sequence[PromptDeltas | None] = (),
) -> list[RequestState]:
    """Encode requests together; arrival and deadline are both the present instant for now.

    Args:
        latents: of each request, for those made from images; may be left out where none is.
        deltas: of each request, for those that change text encoders; likewise.

    Raises:
        InvalidRequest: a request has more references than the model takes.
        ValueError: the model cannot run a request's reuse schedule.
    """
    most = model.profile.max_references
    for request in requests:
        if (count := len(request.references)) > most:
            raise InvalidRequest(f"this model looks at {most} pictures at most, given {count}")
    sent = [one or SentLatents() for one in latents or [None] * len(requests)]
    conditionings = model.encoder.encode(requests, deltas)
    states = [
        RequestState.start(
            request,
            replace(conditioning, references=own.references),
            latent_shape=model.executor.latent_shape(request.width_px, request.height_px),
            table=model.tables.of(request),
            arrival_s=now_s,
            deadline_s=now_s,
            image=own.edit,
        )
        for request, conditioning, own in zip(requests, conditionings, sent, strict=True)
    ]
    for state in states:
        check_reuse(state, model.executor)
    return states


def _check_fit(folder: Path, model: dict[str, Any]) -> None:
    """Refuse components that are whole, but of different models."""
    vae = component_config(folder, "vae")
    # the pixels of FLUX's patches are channels of its transformer
    per_token = patch_size(model) ** 2 if is_flux(model) else 1
    channels = vae["latent_channels"] * per_token
    of_mask = per_token * vae_scale_factor(vae) ** 2 if is_flux(model) else 1
    if model["in_channels"] not in {channels, 2 * channels + of_mask}:
        raise ConfigError(
            f"{folder}: {denoiser_name(folder)} takes latents of {model['in_channels']} channels, "
            f"and vae makes {channels}; they are of different models"
        )
    wanted = model.get("encoder_hid_dim") or model.get("cross_attention_dim")
    if not is_unet(model) or not isinstance(wanted, int):
        return
    encoders = [name for name in component_names(folder) if name.startswith("text_encoder")]
    widths = [component_config(folder, name).get("hidden_size", 0) for name in encoders]
    if sum(widths) != wanted:
        raise ConfigError(
            f"{folder}: unet takes prompts of width {wanted}, and {' and '.join(encoders)} make "
            f"{sum(widths)}; they are of different models"
        )


def _check_schedule(folder: Path, tables: SamplerTables, profile: ModelProfile) -> None:
    """Refuse a scheduler's configuration of which the usual schedule cannot be made."""
    sampler = profile.default_sampler
    steps = min(profile.default_num_steps, profile.max_steps_by_sampler[sampler])
    try:
        tables.table(sampler, steps, (profile.default_width_px, profile.default_height_px))
    except REQUEST_ERRORS as error:
        raise ConfigError(
            f"{folder / 'scheduler' / 'scheduler_config.json'} makes no schedule of {sampler} with "
            f"{steps} steps ({error}); mend it, or give other defaults"
        ) from error


def _family(folder: Path) -> str:
    name = pipeline_name(folder)
    if name not in FAMILY_BY_PIPELINE:
        raise ModelUnsupported(
            f"{folder.name} is a {name}; covered pipelines: {sorted(FAMILY_BY_PIPELINE)}; "
            "a pool serves others with engine: diffusers"
        )
    return FAMILY_BY_PIPELINE[name]


def _load_pipeline(folder: Path, dtype: torch.dtype) -> Any:
    # what a folder leaves out, and what no image is made with, has to be left out by name
    extra: dict[str, Any] = dict.fromkeys(set(UNUSED) & read_object(folder / INDEX).keys())
    if pipeline_name(folder) == "StableDiffusion3Pipeline":
        extra |= dict.fromkeys(set(T5_OF_SD3) - set(component_names(folder)))
    if pipeline_name(folder) == "StableDiffusionXLPipeline":
        # of a package that need not be there; it marks images as diffusers' own
        extra["add_watermarker"] = False
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            folder, dtype=dtype, local_files_only=True, **extra, **load_models(folder, dtype)
        )
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be loaded, the model is incomplete: {error}") from error
    pipeline.vae.to(vae_dtype(component_config(folder, "vae"), dtype))
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            # so that it computes alike in and out of inference mode, wherever it was loaded
            component.requires_grad_(False)
    return pipeline


def _profile(
    pool: PoolConfig, folder: Path, family: str, tables: SamplerTables, sampling: FolderSampling
) -> ModelProfile:
    model = component_config(folder, denoiser_name(folder))
    sizes = model_sizes(pool, model, component_config(folder, "vae"))
    kind, outer = guidance_kind(model), num_outer_blocks(model)
    check_schedules(pool, outer)
    check_group(pool, model)
    defaults = pool.defaults
    guidance = defaults.guidance_scale
    check_sampler(pool, tables.names)
    profile = ModelProfile(
        model=pool.model_name,
        family=family,
        size_multiple_px=sizes.multiple_px,
        min_px=sizes.min_px,
        max_px=sizes.max_px,
        default_width_px=sizes.default_width_px,
        default_height_px=sizes.default_height_px,
        default_num_steps=defaults.num_inference_steps or sampling.num_steps,
        default_guidance_scale=sampling.guidance_scale if guidance is None else guidance,
        default_sampler=defaults.sampler or sampling.sampler,
        max_steps_by_sampler={
            name: tables.max_steps(name, pool.max_num_inference_steps) for name in tables.names
        },
        max_prompt_tokens=max_prompt_tokens(folder),
        created_s=int((folder / "model_index.json").stat().st_mtime),
        guidance=kind,
        fewer_steps=step_table(pool),
        outer_blocks=(outer.start, outer.stop - 1),
        edits=edit_kind(model),
        max_references=MAX_REFERENCES.get(pipeline_name(folder), 0),
        max_reference_px=max_reference_px(sizes.max_px),
        lora_start=None if pool.lora_start is None else pool.lora_start.start(),
    )
    if kind == "none" and profile.default_guidance_scale > 1:
        raise ConfigError(
            f"pool {pool.name}: defaults.guidance_scale is {profile.default_guidance_scale:g}, but "
            "this model is made to do without guidance; leave it out"
        )
    return profile
