"""The ControlNets that a call names, each with the image that was sent for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_cluster.api.input.controlnet_schema import ControlChoice
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import BlobRef, ModelProfile

FIELD = "controlnets"
# diffusion transformers, by the family that a model registers
_TRANSFORMERS = {"stable-diffusion-3", "flux"}


@dataclass(frozen=True, slots=True)
class SentControl:
    """A ControlNet of a call, and the image that was sent for it.

    Attributes:
        param: its entry in the call, for errors.
        bases: models that it is made for.
        image: what was sent, in the input store.
    """

    param: str
    choice: ControlChoice
    bases: tuple[str, ...]
    image: BlobRef

    def check_model(self, profile: ModelProfile) -> None:
        """Refuse a model that it is not made for.

        Raises:
            InvalidRequest: it names the ControlNet's bases.
        """
        if profile.family in _TRANSFORMERS:
            raise InvalidRequest(
                f"The parameter '{self.param}.name' is {self.choice.name!r}, but this image is "
                f"made by {profile.model}, a diffusion transformer ({profile.family}); ControlNets "
                f"are offered for UNets alone. Leave {FIELD!r} out, or choose another model.",
                f"{self.param}.name",
                "controlnet_of_another_model",
            )
        if profile.model not in self.bases:
            raise InvalidRequest(
                f"The parameter '{self.param}.name' is {self.choice.name!r}, which is made for "
                f"{', '.join(self.bases)}, and this image is made by {profile.model}. Set 'model' "
                f"to {' or '.join(map(repr, self.bases))}, or choose a ControlNet of "
                f"{profile.model}.",
                f"{self.param}.name",
                "controlnet_of_another_model",
            )

    def as_in_body(self) -> dict[str, Any]:
        """Return the entry as a body has it, with its image's digest: equal for equal entries."""
        return {**self.choice.model_dump(exclude_none=True), "image": self.image.sha256}


def take_control_images(body: dict[str, Any]) -> list[object]:
    """Take the images out of a body's ControlNets and return them, None where there is none.

    What is no list of objects is left as it is, for the check of the fields.
    """
    entries = body.get(FIELD)
    if not isinstance(entries, list):
        return []
    objects = [dict(one) if isinstance(one, dict) else one for one in entries]
    body[FIELD] = objects
    return [one.pop("image", None) if isinstance(one, dict) else None for one in objects]
