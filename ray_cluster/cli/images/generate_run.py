"""What ``generate`` does with its options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ray_cluster.api.input.schemas import ImageEditRequest
from ray_cluster.cli.images.controlnet_options import (
    ControlNetInput,
    ControlNetOption,
    controlnets_of_recipe,
    parse_controlnets,
    read_controlnets,
)
from ray_cluster.cli.images.edit_inputs import EditInputs, RecipeInputs, read_inputs
from ray_cluster.cli.images.image_files import (
    GeneratedImages,
    PreviewFiles,
    check_writable,
    format_of,
    output_paths,
)
from ray_cluster.cli.images.lora_options import check_names, loras_of_recipe, parse_loras
from ray_cluster.cli.output import stderr
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.engine.files.folders import is_hub_id
from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.requests import ImageFormat

_TIMEOUT_S = 600.0
_SHOWN_CHARS = 60
# of what the text of a recipe is neither the value itself nor its JSON
_VALUE_BY_NAME: Mapping[str, Callable[[str], Any]] = {
    "loras": loras_of_recipe,
    "controlnets": controlnets_of_recipe,
}
# what says how the image came about, and nothing that is needed to make it again
_NOTES = {"cascade"}


class Files(NamedTuple):
    """Files to write, the png whose recipe is repeated (``like``), and images to edit."""

    output: Path
    image_format: ImageFormat | None
    like: Path | None
    force: bool
    edit: tuple[Path, ...]
    mask: Path | None


class Target(NamedTuple):
    """Where the images are made: at a URL, or in this process from a pool of a configuration."""

    url: str | None
    api_key: str | None
    timeout_s: float | None
    config: Path | None
    pool: str | None


class _Inputs(NamedTuple):
    """The images that a call is made from: those that it edits, and those of its ControlNets."""

    edit: EditInputs | None
    controls: tuple[ControlNetInput, ...]

    def added_to(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with them."""
        controls = {"controlnets": [one.entry for one in self.controls]} if self.controls else {}
        return {**body, **({} if self.edit is None else self.edit.body), **controls}


def run(options: Mapping[str, Any], files: Files, target: Target) -> None:
    """Make the images and write them.

    Args:
        options: parameters of the API by name; None leaves one open.

    Raises:
        RayClusterError: a wrong option, a file that is in the way, or no image.
    """
    _check_options(target)
    image_format = format_of(files.output, files.image_format)
    given = {**options, "output_format": image_format}
    if options["loras"] is not None:
        given["loras"] = parse_loras(options["loras"])
    given["controlnets"] = None
    controls = parse_controlnets(options["controlnets"] or ())
    body = {name: value for name, value in given.items() if value is not None}
    _check_finite(body)
    config = load_config(target.config)
    is_named = "model" in body
    body, inputs = _with_inputs(body, files, controls, config.limits.max_input_bytes)
    if not is_named and target.url is None:
        _check_recipe_model(body.get("model"), config)
    # before any work; what is wrong with `n` itself is reported by those who make the images
    num_images = body["n"] if isinstance(body.get("n"), int) and body["n"] > 0 else 1
    paths = output_paths(files.output, image_format or "png", num_images)
    check_writable(paths, force=files.force)
    previews = PreviewFiles(paths, force=files.force)
    try:
        images = _generate(body, inputs, config, target, previews)
    finally:
        previews.remove()
    images.save(paths, force=files.force)


def _check_options(target: Target) -> None:
    """Refuse options that would change nothing."""
    if target.url is not None and target.pool is not None:
        raise ConfigError(
            "--pool changes nothing with --url: the service chooses; give --model instead"
        )
    for name, value in {"--api-key": target.api_key, "--timeout": target.timeout_s}.items():
        if target.url is None and value is not None:
            raise ConfigError(f"{name} changes nothing without --url; leave it out")


def _check_recipe_model(model: str | None, config: ClusterConfig) -> None:
    """Refuse to download what the recipe of a png names, which may come from anybody."""
    if model is None or model in {pool.model_name for pool in config.pools}:
        return
    if not Path(model).expanduser().is_dir() and is_hub_id(model):
        raise InvalidRequest(
            f"The recipe names the model {model!r}, which may have to be downloaded; give it with "
            "--model if you want that.",
            "like",
            "no_recipe",
        )


def _check_finite(body: Mapping[str, Any]) -> None:
    """Refuse numbers that options can write and JSON cannot."""
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(
                f"The parameter {name!r} must be a finite number; given {value}.", name
            )


def _with_inputs(
    body: dict[str, Any], files: Files, controls: Sequence[ControlNetOption], max_bytes: int
) -> tuple[dict[str, Any], _Inputs]:
    """Return a call with what its recipe adds, and the images that it is made from.

    Args:
        max_bytes: of each image.
    """
    if files.like is None:
        edit = read_inputs(files.edit, files.mask, body, max_bytes)
        return body, _Inputs(edit, read_controlnets(controls, max_bytes))
    recipe, wanted = _recipe(files.like)
    wanted.check_given(files.edit, files.mask)
    edit = read_inputs(files.edit, files.mask, body, max_bytes)
    wanted.check_same(edit)
    wanted_controls = recipe.pop("controlnets", ())
    followed = read_controlnets(controls, max_bytes, files.like, wanted_controls)
    return recipe | body, _Inputs(edit, followed)


def _reader_of(name: str) -> Callable[[str], Any]:
    """Return what makes a parameter of the API of its text in a recipe."""
    annotation = ImageEditRequest.model_fields[name].annotation
    kinds = {type(one) if isinstance(one, str) else one for one in _leaves(annotation)}
    return str if str in kinds else json.loads


def _leaves(annotation: Any) -> Iterator[Any]:
    args = get_args(annotation)
    if not args:
        yield annotation
    for one in args:
        yield from _leaves(one)


def _recipe(path: Path) -> tuple[dict[str, Any], RecipeInputs]:
    """Return the recipe in a png of this service: parameters of the API, and its images."""
    from ray_cluster.imaging.encoder import read_recipe

    def unusable(reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"{path}: the recipe cannot be used: {reason}. Give its values as options instead.",
            "like",
            "no_recipe",
        )

    try:
        recipe = read_recipe(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", "like", error.code) from error
    inputs, values = RecipeInputs.taken_from(path, recipe), {}
    for name, text in recipe.items():
        if name in _NOTES:
            continue
        if name == "reuse":
            raise unusable("it was made with blocks kept from earlier steps, as --fidelity allows")
        if name not in ImageEditRequest.model_fields:
            raise unusable(f"there is no parameter {name!r} in this version")
        try:
            values[name] = _VALUE_BY_NAME.get(name, _reader_of(name))(text)
        except (ValueError, KeyError, RecursionError):
            raise unusable(f"{name} is {text[:_SHOWN_CHARS]!r}") from None
    return values, inputs


def _generate(
    body: Mapping[str, Any],
    inputs: _Inputs,
    config: ClusterConfig,
    target: Target,
    previews: PreviewFiles,
) -> GeneratedImages:
    if target.url is None:
        from ray_cluster.cli.images.call_check import check_call

        names = [str(one.values["name"]) for one in inputs.controls]
        call = check_call(body, inputs.edit, names, config, target.pool)
        # torch and diffusers take seconds to import
        from ray_cluster.cli.images.local_images import generate_here

        whole = {**inputs.added_to(body), "model": call.model}
        if call.loras:
            whole["loras"] = [{"name": one.name, "scale": one.scale} for one in call.loras]
        return generate_here(call, whole, config, previews, stderr())
    check_names(body.get("loras", ()))
    from ray_cluster.cli.remote.remote_jobs import generate_there
    from ray_cluster.cli.remote.remote_service import RemoteService

    body = inputs.added_to(body)
    timeout_s = _TIMEOUT_S if target.timeout_s is None else target.timeout_s
    with RemoteService.at(target.url, target.api_key, config, answer_s=timeout_s) as service:
        return generate_there(service, body, timeout_s, previews, stderr())
