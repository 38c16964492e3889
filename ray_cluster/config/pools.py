"""A pool of replicas in the configuration, and what belongs to its model."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ray_cluster.config.sections import Section
from ray_cluster.policies.fidelity import LEAST_SSIM, FewerSteps, ReusedSteps, StepTable
from ray_cluster.policies.reuse import ReuseSchedule
from ray_cluster.requests import MAX_GUIDANCE_SCALE, SamplerName


class DefaultsConfig(Section):
    """What a request gets that does not say; null takes the model's own default."""

    size: str | None = Field(
        None, pattern=r"^[1-9]\d{0,5}x[1-9]\d{0,5}$", description="width x height"
    )
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(
        None, ge=0, le=MAX_GUIDANCE_SCALE, description="1 or less for none: half of the work"
    )
    sampler: SamplerName | None = None


class ReusedStepsConfig(Section):
    """Steps that reuse activations, where those keep a mode at a lower cost than fewer steps.

    Calls that ask for just `asked` steps and may not be degraded are made with them; the others
    with the mode's fewer steps.
    """

    steps: int = Field(ge=2, description="denoising steps; at most `asked`")
    reuse: str = Field(
        description="`outerN-everyM`: all blocks are computed in every M-th step, in the others "
        "only the N outermost ones"
    )
    cost: float = Field(
        gt=0, le=1, description="of these steps, as a share of computing all of them whole"
    )
    ssim: float = Field(ge=LEAST_SSIM["fast"], le=1, description="the worst image's")

    @field_validator("reuse")
    @classmethod
    def _check_name(cls, name: str) -> str:
        ReuseSchedule.parse(name)
        return name

    def reused(self) -> ReusedSteps:
        """Return it for policies."""
        return ReusedSteps(self.steps, ReuseSchedule.parse(self.reuse), self.cost, self.ssim)


class FewerStepsConfig(Section):
    """How few steps will do where ``asked`` are asked for; what was measured of their images."""

    asked: int = Field(ge=1, description="`num_inference_steps` of a call, or fewer")
    balanced: int = Field(ge=1, description="steps that keep the worst image at SSIM 0.95")
    fast: int = Field(ge=1, description="steps that keep it at 0.85")
    balanced_ssim: float = Field(
        LEAST_SSIM["balanced"], ge=LEAST_SSIM["balanced"], le=1, description="the worst image's"
    )
    fast_ssim: float = Field(
        LEAST_SSIM["fast"], ge=LEAST_SSIM["fast"], le=1, description="likewise"
    )
    balanced_reuse: ReusedStepsConfig | None = None
    fast_reuse: ReusedStepsConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> FewerStepsConfig:
        if not self.fast <= self.balanced <= self.asked:
            raise ValueError(
                f"balanced must lie between fast and asked; given fast {self.fast}, balanced "
                f"{self.balanced}, asked {self.asked}"
            )
        for reuse in (self.balanced_reuse, self.fast_reuse):
            if reuse is not None and reuse.steps > self.asked:
                raise ValueError(f"steps must be at most asked, {self.asked}; given {reuse.steps}")
        least = LEAST_SSIM["balanced"]
        if self.balanced_reuse is not None and self.balanced_reuse.ssim < least:
            raise ValueError(
                f"balanced_reuse.ssim must be at least {least}; given {self.balanced_reuse.ssim}"
            )
        return self

    def row(self) -> FewerSteps:
        """Return it for policies."""
        balanced, fast = (
            None if reuse is None else reuse.reused()
            for reuse in (self.balanced_reuse, self.fast_reuse)
        )
        plain = self.model_dump(exclude={"balanced_reuse", "fast_reuse"})
        return FewerSteps(**plain, balanced_reuse=balanced, fast_reuse=fast)


class FidelityConfig(Section):
    """What ``fidelity: balanced`` and ``fast`` mean for a model: fewer steps, or reused ones.

    ``ray-cluster models calibrate`` measures and writes it, for one sampler and up to one guidance
    scale. ``asked`` between two rows takes the fewer steps of the one with more.
    """

    sampler: SamplerName = Field(description="that it was measured with")
    max_guidance_scale: float = Field(ge=0, description="up to which it was measured")
    steps: tuple[FewerStepsConfig, ...] = Field(min_length=1, description="by `asked`, rising")

    @model_validator(mode="after")
    def _check(self) -> FidelityConfig:
        for before, after in pairwise(self.steps):
            if before.asked >= after.asked:
                raise ValueError(
                    f"steps must be ordered by asked; given {after.asked} after {before.asked}"
                )
            if before.balanced > after.balanced or before.fast > after.fast:
                raise ValueError(
                    f"where more steps are asked for, no fewer will do; given fewer for asked "
                    f"{after.asked} than for {before.asked}: raise the later ones"
                )
        return self

    def table(self) -> StepTable:
        """Return it for policies."""
        rows = tuple(row.row() for row in self.steps)
        return StepTable(self.sampler, self.max_guidance_scale, rows)


class PoolTuning(Section):
    """What of a pool changes while it runs."""

    max_batch: int = Field(
        8, ge=1, description="most images of a denoising step; memory may allow fewer"
    )
    max_in_flight: int = Field(
        16,
        ge=1,
        description="most images that a replica holds, those that are being encoded, decoded or "
        "left out of a step included; not below `max_batch`",
    )
    min_replicas: int = Field(
        0, ge=0, description="fewest replicas that a plan may choose for the pool"
    )
    max_replicas: int | None = Field(
        None, ge=1, description="most of them; null for as many as the cluster has room for"
    )
    defaults: DefaultsConfig = DefaultsConfig()
    fidelity: FidelityConfig | None = Field(
        None,
        description="how few steps are balanced and fast; null takes what was measured of a "
        "built-in model, and refuses both with others",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.max_batch > self.max_in_flight:
            raise ValueError(
                f"max_batch {self.max_batch} is above max_in_flight {self.max_in_flight}; "
                "raise max_in_flight or lower max_batch"
            )
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
        return self


class PoolArguments(Section):
    """What of a pool its replicas are started with."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="of the Serve application, and of the model at the API unless `served_as` is "
        "given; `front` is taken",
    )
    model: str = Field(
        description="a built-in model's name, a folder in diffusers' layout, or a hub id"
    )
    served_as: str | None = Field(
        None, description="the model's name at the API: pools with the same one share a queue"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="`cuda` needs `num_gpus`")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the weights; `doctor` tells where half precision is emulated"
    )
    num_cpus: float = Field(
        1.0, ge=0, description="that Ray reserves for a replica; nothing keeps it to them"
    )
    num_gpus: float = Field(
        0.0, ge=0, description="the same of GPUs; replicas with fractions share one"
    )
    num_threads: int = Field(1, ge=1, description="of torch in a replica")
    batches: Literal["mixed", "one-size"] = Field(
        "mixed",
        description="whether images of several sizes share a denoising step; `one-size` is what "
        "other engines do, to compare with: predictions still reckon with `mixed`",
    )
    layout: Literal["auto", "mixed", "grouped"] = Field(
        "auto",
        description="whether the sizes of a step share one model call, or take one each; `auto` "
        "takes what is expected to be faster, by the steps so far",
    )
    min_px: int | None = Field(
        None, ge=8, description="least side of an image; null takes the model's own bound"
    )
    max_px: int | None = Field(None, ge=8, description="largest side, likewise")
    max_num_inference_steps: int = Field(100, ge=1)
    memory_gib: float | None = Field(
        None, gt=0, description="of a replica's device; null takes what is free"
    )
    offload: Literal["auto", "never"] = Field(
        "auto",
        description="whether weights may rest in the machine's memory where a GPU's is short",
    )

    @property
    def model_name(self) -> str:
        """Name of the model at the API."""
        return self.served_as or self.name

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if self.name == "front":
            raise ValueError(
                "pool name 'front' is taken by the gateway application; choose another"
            )
        if self.device == "cuda" and self.num_gpus == 0:
            raise ValueError("device 'cuda' needs num_gpus > 0 (1, or a fraction to share a GPU)")
        if self.min_px is not None and self.max_px is not None and self.min_px > self.max_px:
            raise ValueError(f"min_px {self.min_px} is above max_px {self.max_px}")
        return self


class PoolConfig(PoolTuning, PoolArguments):
    """Replicas of one model on one kind of device: one Serve application."""

    replicas: int = Field(1, ge=1, description="processes at the start, each with the whole model")

    @model_validator(mode="after")
    def _check(self) -> PoolConfig:
        steps = self.defaults.num_inference_steps
        if steps is not None and steps > self.max_num_inference_steps:
            raise ValueError(
                f"defaults.num_inference_steps {steps} is above max_num_inference_steps "
                f"{self.max_num_inference_steps}; raise the one or lower the other"
            )
        most = self.max_replicas
        if self.replicas < self.min_replicas or (most is not None and self.replicas > most):
            raise ValueError(
                f"replicas {self.replicas} is not between min_replicas {self.min_replicas} and "
                f"max_replicas {most}"
            )
        return self
