"""Checks a call for this process before torch and the model's libraries are imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_cluster.api.advice import REFUSED
from ray_cluster.api.input.schemas import ImageEditRequest
from ray_cluster.api.input.sent_images import CheckedImages, Picture
from ray_cluster.api.input.validation import validate, validate_as
from ray_cluster.api.resolve.loras import BasedLora
from ray_cluster.api.resolve.resolver import WantedImages
from ray_cluster.cli.images.edit_inputs import EditInputs
from ray_cluster.cli.images.lora_options import LocalLora, local_loras
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.imaging.edit_images import image_facts, mask_facts
from ray_cluster.models.builtin import BUILTIN_MODELS, BUILTIN_PARTS
from ray_cluster.models.local import LocalModel, ModelSizes, local_model
from ray_cluster.requests import FLOW_SAMPLER_NAMES, SAMPLER_NAMES, LoraUse, ModelProfile

# where nothing is known before the model is downloaded, or it is damaged, everything passes
_ANY = LocalModel(ModelSizes(1, 1, 1 << 30, 1, 1), (*SAMPLER_NAMES, *FLOW_SAMPLER_NAMES))


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call whose parameters are valid, as far as is known without the model's libraries.

    Attributes:
        model: its name where all of these are served.
        pools: of the configuration, or one made for a model that has none; two for a cascade.
        controlnets: likewise.
        loras: the files of its LoRAs.
    """

    model: str
    pools: tuple[PoolConfig, ...]
    controlnets: tuple[ControlNetConfig, ...] = ()
    loras: tuple[LocalLora, ...] = ()


def check_call(
    body: Mapping[str, Any],
    inputs: EditInputs | None,
    controls: Sequence[str],
    config: ClusterConfig,
    pool_name: str | None,
) -> CheckedCall:
    """Validate a call, in a fraction of the time that the imports take.

    Args:
        body: the parameters of the call, by the API's names, without its images.
        inputs: the images that it edits.
        controls: names of its ControlNets.
        pool_name: pool of the configuration; None chooses it by the body's model.

    Raises:
        InvalidRequest: a parameter is wrong.
        ConfigError: there is no such pool.
    """
    if inputs is None:
        fields, images = validate(body), None
    else:
        fields = validate_as(ImageEditRequest, body, REFUSED)
        images = _checked(inputs, config.limits)
    for name in ("priority", "allow", "min_inference_steps"):
        if getattr(fields, name) is not None:
            raise InvalidRequest(
                f"The parameter {name!r} changes nothing without other requests; leave it out, or "
                "give --url.",
                name,
            )
    cascade = next((one for one in config.cascades if one.name == fields.model), None)
    models: list[str | None] = [fields.model]
    if cascade is not None:
        if pool_name is not None:
            raise ConfigError(
                f"{cascade.name} is a cascade of {cascade.light} and {cascade.heavy}, in pools of "
                "their own; leave out --pool or --model"
            )
        models = [cascade.light, cascade.heavy]
    pools = tuple(choose_pool(config, one, pool_name) for one in models)
    pool = pools[-1]
    files = local_loras(body.get("loras") or ())
    # whether they fit the model is known once they are read
    uses = tuple(BasedLora(LoraUse(one.name, one.scale), pool.model_name) for one in files)
    wanted = WantedImages(fields, images, is_stored=False, loras=uses)
    # without fidelity: its steps depend on defaults that only the model's files have
    without = replace(wanted, fields=fields.model_copy(update={"fidelity": None}))
    num_images = 0 if images is None else len(images.pictures)
    without.of(_profile(pool, num_images), config.limits)
    used = tuple(_controlnet(config, name, pool.model_name) for name in dict.fromkeys(controls))
    model = pool.model_name if cascade is None else cascade.name
    return CheckedCall(model, pools, used, files)


def _controlnet(config: ClusterConfig, name: str, base: str) -> ControlNetConfig:
    """Return a ControlNet that this process runs: of the configuration, or a built-in one."""
    for one in config.controlnets:
        if one.name == name:
            if base not in one.bases:
                raise InvalidRequest(
                    f"The parameter 'controlnets' names {name!r}, which is made for "
                    f"{', '.join(one.bases)}, not for {base}.",
                    "controlnets",
                )
            return one.model_copy(update={"mode": "local"})
    if BUILTIN_PARTS.get(name) == "ControlNet":
        return ControlNetConfig(name=name, model=name, bases=(base,), mode="local")
    there = [one.name for one in config.controlnets]
    builtin = [one for one, kind in BUILTIN_PARTS.items() if kind == "ControlNet"]
    raise InvalidRequest(
        f"The parameter 'controlnets' names {name!r}; the configuration has "
        f"{', '.join(there) or 'none'}, and built-in are {', '.join(builtin)}. Give one of these, "
        "with --config the configuration of the service that has it, or --url for that service.",
        "controlnets",
    )


def _checked(inputs: EditInputs, limits: LimitsConfig) -> CheckedImages:
    """Decode the images of an edit and return what they are, as a gateway does."""
    images, mask = inputs
    most = limits.max_input_pixels
    (image, facts), *more = (
        Picture(one.ref, image_facts(one.data, "image", most)) for one in images
    )
    found = CheckedImages(image, facts, more=tuple(more))
    if mask is None:
        return found
    return replace(found, mask=mask.ref, mask_facts=mask_facts(mask.data, "mask", most))


def choose_pool(config: ClusterConfig, model: str | None, pool_name: str | None) -> PoolConfig:
    """Return the pool: by name, by the model it serves, or made for a model that has none.

    Raises:
        InvalidRequest: no pool serves such a model, and it is no model itself.
        ConfigError: there is no pool of that name, or it serves another model.
    """
    if pool_name is not None:
        pool = config.worker(PoolConfig, pool_name)
        if model not in {None, pool.model_name}:
            raise ConfigError(
                f"pool {pool_name} serves {pool.model_name}, not {model}; leave out --pool or "
                "--model"
            )
        return pool
    if model is None:
        return config.pools[0]
    for pool in config.pools:
        if pool.model_name == model:
            return pool
    if model in BUILTIN_MODELS or "/" in model:
        return PoolConfig(name="local", model=model, served_as=model)
    served = sorted({*(one.model_name for one in config.pools), *(c.name for c in config.cascades)})
    raise InvalidRequest(
        f"The parameter 'model' is {model!r}; the configuration serves {', '.join(served)}, and "
        f"built-in are {', '.join(BUILTIN_MODELS)}. Give one of these, a folder, or a hub id of "
        "the form owner/name; or with --config the configuration of the service that has it.",
        "model",
    )


def _profile(pool: PoolConfig, num_images: int) -> ModelProfile:
    """Return what the model accepts, or a little more where only its libraries know.

    Args:
        num_images: that are edited.
    """
    found = local_model(pool) or _ANY
    sizes, defaults = found.sizes, pool.defaults
    return ModelProfile(
        model=pool.model_name,
        family="",
        size_multiple_px=sizes.multiple_px,
        min_px=sizes.min_px,
        max_px=sizes.max_px,
        default_width_px=sizes.default_width_px,
        default_height_px=sizes.default_height_px,
        default_num_steps=defaults.num_inference_steps or 1,
        default_guidance_scale=5.0 if defaults.guidance_scale is None else defaults.guidance_scale,
        default_sampler=defaults.sampler or found.samplers[0],
        max_steps_by_sampler=dict.fromkeys(found.samplers, pool.max_num_inference_steps),
        max_prompt_tokens=0,
        created_s=0,
        max_references=0 if found is not _ANY or num_images == 1 else num_images,
    )
