"""Discriminators, and the cascades that they decide in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from ray_cluster.config.section import LIVE, Section
from ray_cluster.config.sections.workers import Hardware, WorkerConfig


class DiscriminatorConfig(Hardware, WorkerConfig):
    """Replicas that say how sure one can be that an image is right for its prompt."""

    model: str = Field(
        min_length=1,
        description="a built-in discriminator, or a folder or hub id of a CLIP-type model or an "
        "image classifier that `models calibrate-cascade` has calibrated",
    )
    calibration: str | None = Field(
        None,
        description="folder that `models calibrate-cascade` has written; null for the model's own",
    )
    max_batch: int = Field(
        16, ge=1, le=256, description="images scored together at most", json_schema_extra=LIVE
    )
    max_in_flight: int = Field(
        64,
        ge=1,
        le=4096,
        description="images that a replica holds at most; at least `max_batch`",
        json_schema_extra=LIVE,
    )

    @property
    def most_in_flight(self) -> int:
        return self.max_in_flight

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.max_in_flight < self.max_batch:
            raise ValueError(
                f"max_in_flight {self.max_in_flight} is below max_batch {self.max_batch}: a batch "
                "would never be full; raise the one or lower the other"
            )
        return self


class CascadeConfig(Section):
    """A model at the API that is two: a light one, and a heavy one for what that does badly."""

    APPLIED = "live"

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="name of the cascade, by which calls name it as their `model`",
    )
    light: str = Field(description="model of the pools that make each image first")
    heavy: str = Field(description="model of the pools that make an image anew")
    discriminator: str = Field(description="name of the discriminator that scores light images")
    threshold: float | None = Field(
        None, ge=0, le=1, description="confidence below which a light image is made anew"
    )
    deferral_rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the images that are made anew, in place of `threshold`: that follows "
        "from the latest confidences",
    )
    reserve_s: float | None = Field(
        0.5,
        ge=0,
        description="slack below which a request's threshold falls, to 0 where the heavy model "
        "would probably be late; null makes images anew even if that is late",
    )
    when_unscored: Literal["light", "heavy"] = Field(
        "light", description="whose image is published while no discriminator answers"
    )
    curves: str | None = Field(
        None,
        description="file with the calibrated deferral curve, against which drift is measured; "
        "null for the discriminator's own",
    )
    window: int = Field(
        500, ge=20, le=100_000, description="confidences of which deferral rates are quantiles"
    )

    @model_validator(mode="after")
    def _check_threshold(self) -> CascadeConfig:
        if (self.threshold is None) == (self.deferral_rate is None):
            raise ValueError(
                f"cascade {self.name} needs either threshold or deferral_rate; given "
                f"{self.threshold} and {self.deferral_rate}"
            )
        if self.light == self.heavy:
            raise ValueError(f"light and heavy are both {self.light}; name two models")
        return self


def check_cascades(
    cascades: Sequence[CascadeConfig],
    discriminators: Sequence[DiscriminatorConfig],
    models: Sequence[str],
) -> None:
    """Raise ValueError unless the names in cascades are there, and no model has one of theirs.

    Args:
        models: that pools serve.
    """
    names = [*dict.fromkeys(models), *(one.name for one in cascades)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"the names of models and cascades must differ; given more than once: {twice}"
        )
    known = {
        "light": set(models),
        "heavy": set(models),
        "discriminator": {one.name for one in discriminators},
    }
    for cascade in cascades:
        for key, there in known.items():
            if getattr(cascade, key) not in there:
                raise ValueError(
                    f"cascade {cascade.name}: {key} is {getattr(cascade, key)!r}; there are "
                    f"{', '.join(sorted(there)) or 'none'}"
                )
