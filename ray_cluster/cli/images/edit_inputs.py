"""The images that ``generate --edit`` and ``--mask`` name, and what a recipe says of them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray_cluster.errors import ConfigError
from ray_cluster.requests import BlobRef

# the fields of an edit that say nothing without an image -> their options
_OPTION_BY_FIELD: Mapping[str, str] = {
    "strength": "--strength",
    "feather_px": "--feather",
    "crop": "--crop",
    "paste_back": "--paste-back",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """An image of the client's, whole.

    Attributes:
        option: that names it.
    """

    option: str
    path: Path
    data: bytes

    @property
    def shown(self) -> str:
        """The option as it was given, for errors."""
        return _shown(self.option, self.path)

    @property
    def ref(self) -> BlobRef:
        """What names its bytes."""
        return BlobRef(hashlib.sha256(self.data).hexdigest(), len(self.data))

    @property
    def base64(self) -> str:
        """Its bytes as a JSON body holds them."""
        return base64.b64encode(self.data).decode("ascii")


class EditInputs(NamedTuple):
    """What an edit is made from; no mask: everything is edited."""

    images: tuple[InputFile, ...]
    mask: InputFile | None

    @property
    def body(self) -> dict[str, str | list[str]]:
        """Its fields in a JSON body."""
        images = [one.base64 for one in self.images]
        found: dict[str, str | list[str]] = (
            {"images": images} if len(images) > 1 else {"image": images[0]}
        )
        return found if self.mask is None else found | {"mask": self.mask.base64}


def read_inputs(
    images: Sequence[Path], mask: Path | None, options: Mapping[str, Any], max_bytes: int
) -> EditInputs | None:
    """Return the images of an edit; None for a call that is none.

    Args:
        options: parameters of the API by name, those that are given.
        max_bytes: of each file.

    Raises:
        ConfigError: a file cannot be read or is too large, or an option changes nothing without an
            image; it names the option.
    """
    if images:
        read_mask = None if mask is None else read_input("--mask", mask, max_bytes)
        return EditInputs(tuple(read_input("--edit", one, max_bytes) for one in images), read_mask)
    idle = [option for name, option in _OPTION_BY_FIELD.items() if name in options]
    idle += ["--mask"] if mask is not None else []
    if idle:
        raise ConfigError(
            f"{idle[0]} changes nothing without an image to edit; give one with --edit, or leave "
            f"{idle[0]} out"
        )
    return None


def read_input(option: str, path: Path, max_bytes: int) -> InputFile:
    """Read an image; raises :class:`ConfigError` where that fails, or it is too large.

    Args:
        option: that names it; with the file right behind it where it ends in ``=``.
    """
    shown = _shown(option, path)
    try:
        with path.open("rb") as stream:
            # never more than needed to know that it is too large
            data = stream.read(max_bytes + 1)
    except IsADirectoryError as error:
        raise ConfigError(f"{shown} is a folder; give an image file") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{shown}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}") from error
    if not data:
        raise ConfigError(f"{shown} is empty; give a PNG, JPEG, WebP or AVIF image")
    if len(data) > max_bytes:
        raise ConfigError(
            f"{shown} is larger than the {max_bytes} bytes that limits.max_input_bytes "
            "allows; give a smaller image, or with --config the configuration of a service that "
            "allows more"
        )
    return InputFile(option, path, data)


def _shown(option: str, path: Path) -> str:
    return f"{option}{path}" if option.endswith("=") else f"{option} {path}"


@dataclass(frozen=True, slots=True)
class RecipeInputs:
    """The images that the image of a recipe was made from, by their digests.

    Attributes:
        like: the png of the recipe.
        image_sha256: of each; none where it was made from text alone.
        mask_sha256: None where it was made without a mask.
    """

    like: Path
    image_sha256: tuple[str, ...]
    mask_sha256: str | None

    @classmethod
    def taken_from(cls, like: Path, recipe: dict[str, str]) -> RecipeInputs:
        """Take the digests out of a recipe, which is left with parameters of the API."""
        image, looked_at = (recipe.pop(f"{name}_sha256", None) for name in ("image", "references"))
        digests = [] if image is None else [image]
        # of an edit beside them, the first is the image
        with suppress(ValueError, TypeError):
            digests = digests if looked_at is None else [str(one) for one in json.loads(looked_at)]
        return cls(like, tuple(digests), recipe.pop("mask_sha256", None))

    def check_given(self, images: Sequence[Path], mask: Path | None) -> None:
        """Refuse a call that does not name the images of the recipe's edit.

        Raises:
            ConfigError: it says which files are missing, by their digests.
        """
        wanted = [("--edit", one) for one in self.image_sha256[len(images) :]]
        if self.mask_sha256 is not None and mask is None:
            wanted.append(("--mask", self.mask_sha256))
        missing = [
            f"with {option} the file whose SHA-256 digest is {sha256}" for option, sha256 in wanted
        ]
        if missing:
            raise ConfigError(
                f"{self.like} was made from images that its recipe does not hold; give "
                f"{', and '.join(missing)}"
            )

    def check_same(self, inputs: EditInputs | None) -> None:
        """Refuse other images than those of the recipe's edit.

        Raises:
            ConfigError: it says which files are others, with both digests.
        """
        if inputs is None:
            return
        num_more = len(inputs.images) - len(self.image_sha256)
        if num_more > 0 and self.image_sha256:
            raise ConfigError(
                f"{inputs.images[-num_more].shown} is one more than the images that {self.like} "
                "was made from; leave it out, or leave --like out"
            )
        pairs = (
            *zip(inputs.images, self.image_sha256, strict=False),
            (inputs.mask, self.mask_sha256),
        )
        others = [
            f"{file.shown} is not the file that {self.like} was made from: its "
            f"SHA-256 digest is {file.ref.sha256}, and the recipe's is {sha256}"
            for file, sha256 in pairs
            if file is not None and sha256 not in {None, file.ref.sha256}
        ]
        if others:
            raise ConfigError(
                f"{'; '.join(others)}. Give the recipe's files, or leave --like out and give its "
                "values as options"
            )
