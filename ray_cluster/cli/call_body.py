"""The body of one API call from the command's options and a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray_cluster.errors import ConfigError, InvalidRequest

# how the text of a recipe becomes a value of the API
_VALUE_BY_NAME: Mapping[str, Callable[[str], Any]] = {
    "model": str,
    "prompt": str,
    "negative_prompt": str,
    "size": str,
    "num_inference_steps": int,
    "guidance_scale": float,
    "sampler": str,
    "seed": int,
}


def call_body(options: Mapping[str, Any], like: Path | None) -> dict[str, Any]:
    """Return the parameters of the call: the options, and what they leave open as in ``like``.

    Args:
        options: values by the API's names; None leaves a parameter open.

    Raises:
        InvalidRequest: ``like`` is no png that carries a recipe.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return given if like is None else recipe_values(like) | given


def recipe_values(path: Path) -> dict[str, Any]:
    """Return the recipe in a png of this service as parameters of the API.

    Raises:
        ConfigError: the file cannot be read.
        InvalidRequest: it carries no recipe, or one that this version does not understand.
    """
    from ray_cluster.imaging.encoder import read_recipe

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        recipe = read_recipe(data)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", "image", error.code) from error
    values = {}
    for name, text in recipe.items():
        if name not in _VALUE_BY_NAME:
            raise _not_understood(path, f"there is no parameter {name!r} in this version")
        try:
            values[name] = _VALUE_BY_NAME[name](text)
        except ValueError:
            raise _not_understood(path, f"{name} is {text!r}") from None
    return values


def _not_understood(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}: the recipe cannot be used: {reason}. Give its values as options instead.",
        "image",
        "no_recipe",
    )
