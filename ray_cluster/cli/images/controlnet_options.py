"""The ControlNets that ``generate --control`` names, each with the file that it follows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_cluster.cli.images.edit_inputs import InputFile, read_input
from ray_cluster.errors import ConfigError, InvalidRequest

_OPTION = "--control"
_NUMBER = r"-?[0-9]*\.?[0-9]+(?:e-?[0-9]+)?"
# names hold neither + nor =; a file's name may hold anything
_CONTROL = re.compile(
    r"(?P<name>[^=+]+)(?:\+(?P<preprocess>[^=]+))?=(?P<path>.+?)"
    rf"(?::(?P<scale>{_NUMBER})(?::(?P<start>{_NUMBER})-(?P<end>{_NUMBER}))?)?",
    re.DOTALL,
)
_TEXTS, _NUMBERS = ("name", "preprocess"), ("scale", "start", "end")
_DIGESTS = ("image_sha256", "map_sha256")


class ControlNetOption(NamedTuple):
    """A ControlNet as the option names it.

    Attributes:
        values: those of its values that are given, as the API has them.
    """

    path: Path
    values: dict[str, Any]


class ControlNetInput(NamedTuple):
    """A ControlNet with the file that it follows, whole."""

    file: InputFile
    values: dict[str, Any]

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in a JSON body."""
        return {**self.values, "image": self.file.base64}


def parse_controlnets(texts: Sequence[str]) -> list[ControlNetOption]:
    """Return what options like ``edges+canny=photo.png:0.8:0-0.6`` mean.

    Raises:
        InvalidRequest: one has another form.
    """
    return [_parsed(text) for text in texts]


def _parsed(text: str) -> ControlNetOption:
    found = _CONTROL.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            f"{_OPTION} {text!r} is no ControlNet with a file; write NAME=FILE, such as "
            "edges=sketch.png; or NAME+DETECTOR=FILE:SCALE:START-END, such as "
            "edges+canny=photo.png:0.8:0-0.6.",
            "controlnets",
        )
    given = {name: value for name, value in found.groupdict().items() if value is not None}
    values: dict[str, Any] = {name: given[name] for name in _TEXTS if name in given}
    values |= {name: float(given[name]) for name in _NUMBERS if name in given}
    return ControlNetOption(Path(given["path"]), values)


def controlnets_of_recipe(text: str) -> list[dict[str, Any]]:
    """Return the ControlNets of a recipe; raises ValueError for anything else."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and {"name", *_DIGESTS} <= one.keys() for one in found
    ):
        raise ValueError(f"{text!r} is no list of ControlNets")
    return found


def read_controlnets(
    given: Sequence[ControlNetOption],
    max_bytes: int,
    like: Path | None = None,
    recipe: Sequence[dict[str, Any]] = (),
) -> tuple[ControlNetInput, ...]:
    """Read the files of ControlNets; what an option leaves open is as in the recipe.

    Args:
        max_bytes: of each file.
        like: the png of the recipe.
        recipe: its ControlNets.

    Raises:
        ConfigError: a file cannot be read or is too large, or is not the recipe's; or one of the
            recipe's ControlNets is missing.
    """
    if recipe and [one.values["name"] for one in given] != [one["name"] for one in recipe]:
        wanted = [
            f"{_OPTION} {one['name']}=FILE with the file whose SHA-256 digest is "
            f"{one['image_sha256']}"
            for one in recipe
        ]
        raise ConfigError(
            f"{like} was made with ControlNets, and its recipe does not hold their images; give "
            f"{', and '.join(wanted)}"
        )
    inputs = [_read(one, max_bytes) for one in given]
    if not recipe:
        return tuple(inputs)
    return tuple(_as_in(one, wanted, like) for one, wanted in zip(inputs, recipe, strict=True))


def _read(one: ControlNetOption, max_bytes: int) -> ControlNetInput:
    option = f"{_OPTION} {one.values['name']}="
    return ControlNetInput(read_input(option, one.path, max_bytes), one.values)


def _as_in(one: ControlNetInput, wanted: dict[str, Any], like: Path | None) -> ControlNetInput:
    digest = one.file.ref.sha256
    if digest != wanted["image_sha256"]:
        raise ConfigError(
            f"{one.file.shown} is not the file that {like} was made from: its SHA-256 digest is "
            f"{digest}, and the recipe's is {wanted['image_sha256']}. Give the recipe's file, or "
            "leave --like out and give its values as options"
        )
    values = {name: value for name, value in wanted.items() if name not in _DIGESTS}
    return one._replace(values=values | one.values)
