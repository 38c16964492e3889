"""What the files of a model say, before torch and diffusers are imported."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.cascade_curves import CALIBRATION, DEFERRAL, load_curves
from ray_cluster.models.checkpoints.folders import checkpoint_folder
from ray_cluster.models.checkpoints.names import is_single_file
from ray_cluster.models.json_files import read_object
from ray_cluster.models.weight_files import INDEX
from ray_cluster.policies.steps.reuse import num_outer_blocks
from ray_cluster.requests import FLOW_SAMPLER_NAMES, EngineKind, SamplerName, noise_samplers

# FLUX's pipeline has these numbers, not its transformer's configuration
_FLUX_PATCH = 2
_FLUX_SAMPLE_SIZE = 128
_UNET_MULTIPLE_PX = 8
# that FLUX.1 Kontext's pictures have
_TRAINED_PX = 1024 * 1024
# what diffusers' pipeline takes where the UNet does not say
_SDXL_SAMPLE_SIZE = 128
# what diffusers and transformers read of a folder
_READ = {".json", ".txt", ".model", ".safetensors", ".gguf", ".bin"}
_BESIDE = {CALIBRATION, DEFERRAL, "training.json", "evaluation.json"}
_NUM_THREADS = 4

FAMILY_BY_PIPELINE: Mapping[str, str] = {
    "StableDiffusionPipeline": "stable-diffusion",
    "StableDiffusionXLPipeline": "stable-diffusion-xl",
    "StableDiffusion3Pipeline": "stable-diffusion-3",
    "FluxPipeline": "flux",
    "FluxKontextPipeline": "flux",
    "FluxFillPipeline": "flux",
}
"""The families of the step engine, by their text-to-image pipelines."""
MAX_REFERENCES: Mapping[str, int] = {"FluxKontextPipeline": 1}
"""Most pictures that a pipeline's models look at in the step engine: as in diffusers, or none."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bounds and default of a model's sides.

    Attributes:
        multiple_px: every side is a multiple of it.
    """

    multiple_px: int
    min_px: int
    max_px: int
    default_width_px: int
    default_height_px: int


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What is known of a model that is built in or in a folder of this machine."""

    sizes: ModelSizes
    samplers: Sequence[SamplerName]


def local_model(pool: PoolConfig) -> LocalModel | None:
    """Return what a pool's model can do, as far as its files say.

    Returns:
        None where its files cannot be read: it is not downloaded, or is elsewhere, or is damaged;
        or where only its pipeline can tell.

    Raises:
        ConfigError: there cannot be a model of that name, or the pool's sizes or its sampler do
            not suit it.
    """
    folder = builtin_folder(pool.model) or Path(pool.model).expanduser()
    if is_single_file(pool.model):
        try:
            folder = checkpoint_folder(pool.model, pool.prediction)
        except ConfigError:
            # said where files are checked
            return None
    if "/" not in pool.model and not folder.is_dir():
        raise no_such_model(pool.model)
    if _is_called(pool, folder):
        return None
    is_flow = (folder / "transformer").is_dir()
    try:
        model, vae, scheduler = (
            read_object(folder / name)
            for name in (
                f"{'transformer' if is_flow else 'unet'}/config.json",
                "vae/config.json",
                "scheduler/scheduler_config.json",
            )
        )
    except ConfigError:
        return None
    try:
        sizes = model_sizes(pool, model, vae)
        predicts = scheduler.get("prediction_type", "epsilon")
        outer = num_outer_blocks(model)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    samplers = FLOW_SAMPLER_NAMES if is_flow else noise_samplers(predicts)
    check_sampler(pool, samplers)
    check_schedules(pool, outer)
    check_group(pool, model)
    return LocalModel(sizes, samplers)


def engine_of(pool: PoolConfig, pipeline: str) -> EngineKind:
    """Return what runs a pool's model: where nobody says, calls are for what steps do not cover.

    Args:
        pipeline: class of the pipeline that takes text alone, of the model's folder.

    Raises:
        ConfigError: the pool has settings that are of another engine alone, or of checkpoints.
    """
    if pool.prediction is not None and not is_single_file(pool.model):
        what = "cannot be set: its model is a folder, which says itself what it predicts"
        raise ConfigError(f"pool {pool.name}: prediction {what}; leave it out")
    is_covered = pipeline in FAMILY_BY_PIPELINE
    if pool.engine == "steps" or (pool.engine == "auto" and is_covered):
        if pool.max_references is not None:
            what = "cannot be set: its model is run step by step; leave it out"
            raise ConfigError(f"pool {pool.name}: max_references {what}")
        return "steps"
    if given := pool.only_of_steps:
        raise ConfigError(
            f"pool {pool.name}: {' and '.join(given)} cannot be set: its model, a {pipeline}, is "
            "run call by call (engine: diffusers); leave it out"
        )
    return "diffusers"


def _is_called(pool: PoolConfig, folder: Path) -> bool:
    """Whether a folder's model is run call by call; False where its index cannot be read."""
    try:
        pipeline = str(read_object(folder / INDEX)["_class_name"])
        pipeline = pipeline.replace("InpaintPipeline", "Pipeline")
    except (ConfigError, LookupError):
        return False
    return engine_of(pool, pipeline) == "diffusers"


def check_models(config: ClusterConfig) -> None:
    """Check the pools of a configuration against their models, and read the cascades' curves.

    Raises:
        ConfigError: as of :func:`local_model`, or a cascade's file cannot be used.
    """
    for pool in config.pools:
        local_model(pool)
    for cascade in config.cascades:
        if cascade.curves is not None:
            try:
                load_curves(cascade.curves)
            except ConfigError as error:
                raise ConfigError(f"cascade {cascade.name}: curves: {error}") from error


def no_such_model(model: str) -> ConfigError:
    """Return the error for what names no model."""
    return ConfigError(
        f"model {model!r} is neither a built-in name, nor a diffusers folder that exists, "
        "nor a hub id of the form owner/name"
    )


def check_sampler(pool: PoolConfig, offered: Sequence[SamplerName]) -> None:
    """Refuse a pool whose default sampler its model does not offer.

    Raises:
        ConfigError: it names those that are offered.
    """
    given = pool.defaults.sampler
    if given is not None and given not in offered:
        raise ConfigError(
            f"pool {pool.name}: defaults.sampler is {given}, which this model does not offer; "
            f"allowed: {', '.join(offered)}"
        )


def group_degrees(pool: PoolConfig, model: Mapping[str, Any]) -> tuple[int, ...]:
    """Return those degrees of a pool's group that a transformer's heads can be divided by."""
    heads = model.get("num_attention_heads") or 1
    return tuple(one for one in pool.set_degrees if heads % one == 0)


def check_group(pool: PoolConfig, model: Mapping[str, Any]) -> None:
    """Refuse a model that no group can step.

    Args:
        model: as of :func:`model_sizes`.

    Raises:
        ConfigError: with what was given and what is allowed.
    """
    if not pool.is_group:
        return
    if "block_out_channels" in model:
        raise ConfigError(
            f"pool {pool.name}: ranks is {pool.ranks}, and its model is a UNet; groups step "
            "diffusion transformers (SD3, FLUX.1): set ranks: 1, and replicas instead"
        )
    if model.get("out_channels") not in {None, model.get("in_channels")}:
        raise ConfigError(
            f"pool {pool.name}: ranks is {pool.ranks}, and its model fills masked images, which "
            "groups do not; set ranks: 1"
        )
    if not group_degrees(pool, model):
        raise ConfigError(
            f"pool {pool.name}: none of its degrees {list(pool.set_degrees)} divides the model's "
            f"{model.get('num_attention_heads')} heads; leave degrees out"
        )


def model_sizes(pool: PoolConfig, model: Mapping[str, Any], vae: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes as the model's parts and the pool say.

    Args:
        model: the UNet's or transformer's configuration in diffusers' form.
        vae: the autoencoder's, likewise.

    Raises:
        ConfigError: the pool's sizes do not suit the model, or it allows larger images than the
            model has positions for.
    """
    factor = vae_scale_factor(vae)
    # a UNet takes sides of any number of latent pixels, its pipeline multiples of 8 px
    is_unet = "block_out_channels" in model
    multiple = math.lcm(factor, _UNET_MULTIPLE_PX) if is_unet else factor * patch_size(model)
    own = _sample_size(model)
    if pool.defaults.size is not None:
        width, height = (int(part) for part in pool.defaults.size.split("x"))
    elif own is not None:
        width, height = (factor * side for side in own)
    else:
        raise ConfigError(
            f"pool {pool.name}: the model's config.json has sample_size null, so it has no size of "
            "its own; give defaults.size, such as 512x512"
        )
    positions = model.get("pos_embed_max_size")
    limit = None if positions is None else positions * multiple
    if limit is not None and (pool.max_px or 0) > limit:
        raise ConfigError(
            f"pool {pool.name}: max_px is {pool.max_px}, but the model has positions for sides of "
            f"at most {limit} px; lower max_px"
        )
    # what a model was trained for bounds what it can make; a default may lie above that
    largest = 2 * max(width, height) if own is None else max(2 * factor * max(own), width, height)
    found = ModelSizes(
        multiple_px=multiple,
        min_px=pool.min_px or multiple,
        max_px=pool.max_px or (largest if limit is None else min(largest, limit)),
        default_width_px=width,
        default_height_px=height,
    )
    check_sides(pool, found)
    return found


def check_sides(pool: PoolConfig, sizes: ModelSizes) -> None:
    """Refuse a pool whose sizes do not suit its model.

    Raises:
        ConfigError: it says what does.
    """
    sides = {
        "default width": sizes.default_width_px,
        "default height": sizes.default_height_px,
        "min_px": sizes.min_px,
        "max_px": sizes.max_px,
    }
    for name, side in sides.items():
        if side % sizes.multiple_px or not sizes.min_px <= side <= sizes.max_px:
            raise ConfigError(
                f"pool {pool.name}: {name} is {side}; sides of this model are multiples of "
                f"{sizes.multiple_px} from {sizes.min_px} to {sizes.max_px}; "
                "change defaults.size, min_px or max_px"
            )


def patch_size(transformer: Mapping[str, Any]) -> int:
    """Return the latent pixels along a side of a transformer's tokens, from its configuration."""
    # FLUX's own says 1: its pipeline makes the patches
    return int(transformer["patch_size"]) if "sample_size" in transformer else _FLUX_PATCH


def _sample_size(model: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return width and height of a model's usual images in latent pixels; None if it has none."""
    sample = model.get("sample_size", _FLUX_SAMPLE_SIZE)
    if sample is None and model.get("addition_embed_type") == "text_time":
        sample = _SDXL_SAMPLE_SIZE
    if sample is None:
        return None
    rows, columns = (sample, sample) if isinstance(sample, int) else sample
    return columns, rows


def max_reference_px(max_px: int) -> int:
    """Return the most pixels of a picture that a model looks at, from its longest side."""
    return min(_TRAINED_PX, max_px**2)


def vae_scale_factor(vae: Mapping[str, Any]) -> int:
    """Return image pixels per latent pixel of an autoencoder, from its configuration."""
    if "temperal_downsample" in vae:
        return int(2 ** len(vae["temperal_downsample"]))
    blocks = vae.get("block_out_channels") or vae["decoder_block_out_channels"]
    return int(2 ** (len(blocks) - 1))


def model_digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files that a model is loaded from.

    Every byte counts: weights that differ in a few tensors make other images. Hashing goes on
    without the interpreter's lock, some GB/s with the files in memory.
    """
    return _digest(folder, [path for path in _read(folder) if _is_component(path, folder)])


def scorer_digest(folder: Path) -> str:
    """Return likewise a digest of a discriminator, whose files are in the folder itself.

    What it was calibrated with, and what is said of it, may lie beside them and does not count.
    """
    return _digest(folder, [path for path in _read(folder) if path.name not in _BESIDE])


def _read(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in _READ and path.is_file())


def _digest(folder: Path, paths: Sequence[Path]) -> str:
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="digest") as threads:
        # the components of a checkpoint in one file link to it
        files = list(dict.fromkeys(path.resolve() for path in paths))
        digest_of = dict(zip(files, threads.map(_file_digest, files), strict=True))
    whole = hashlib.sha256()
    for path in paths:
        digest = digest_of[path.resolve()]
        whole.update(f"{path.relative_to(folder).as_posix()}\0{digest}\0".encode())
    return whole.hexdigest()


def _is_component(path: Path, folder: Path) -> bool:
    """Whether it belongs to a component, or is the index; cards lie beside them."""
    return path.parent != folder or path.name == "model_index.json"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_schedules(pool: PoolConfig, outer_blocks: range) -> None:
    """Refuse a pool whose fidelity table has a reuse schedule that its model cannot run.

    Raises:
        ConfigError: it says what is allowed.
    """
    table = None if pool.fidelity is None else pool.fidelity.table()
    for schedule in () if table is None else table.schedules:
        if schedule.num_outer not in outer_blocks:
            raise ConfigError(
                f"pool {pool.name}: fidelity has the reuse schedule {schedule}, but this model can "
                f"compute {outer_blocks.start} to {outer_blocks.stop - 1} outer blocks; change it, "
                "or have the table measured by models calibrate"
            )
