"""A pool of replicas in the configuration, and what belongs to its model."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ray_cluster.config.section import CALLS, LIVE, Section
from ray_cluster.config.sections.workers import Hardware, WorkerConfig
from ray_cluster.policies.costs.number_formats import Capability, NumberFormat, default_format
from ray_cluster.policies.fidelity import LEAST_SSIM, FewerSteps, LoraStart, ReusedSteps, StepTable
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.requests import MAX_GUIDANCE_SCALE, SamplerName


class DefaultsConfig(Section):
    """Values for requests that do not give them; null takes the model's own default."""

    size: str | None = Field(
        None, pattern=r"^[1-9]\d{0,5}x[1-9]\d{0,5}$", description="width x height"
    )
    num_inference_steps: int | None = Field(None, ge=1, description="denoising steps")
    guidance_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_GUIDANCE_SCALE,
        description="guidance scale; 1 or less turns it off, which halves the work",
    )
    sampler: SamplerName | None = Field(None, description="sampler")


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
    """Step counts that replace ``asked`` steps, and the measured quality of their images."""

    asked: int = Field(
        ge=1, description="`num_inference_steps` of a call, up to which the row holds"
    )
    balanced: int = Field(
        ge=1, description="fewest steps with an SSIM of at least 0.95 for every image"
    )
    fast: int = Field(ge=1, description="fewest steps with at least 0.85")
    balanced_ssim: float = Field(
        LEAST_SSIM["balanced"], ge=LEAST_SSIM["balanced"], le=1, description="lowest SSIM measured"
    )
    fast_ssim: float = Field(
        LEAST_SSIM["fast"], ge=LEAST_SSIM["fast"], le=1, description="the same for `fast`"
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
    """Step counts for ``fidelity: balanced`` and ``fast``, as ``models calibrate`` measures them.

    They hold for this sampler and up to this guidance scale; nothing checks that. A count between
    two rows takes the fewer steps of the row with more.
    """

    sampler: SamplerName = Field(description="sampler of the measurement")
    max_guidance_scale: float = Field(ge=0, description="largest guidance scale of the measurement")
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


class LoraStartConfig(Section):
    """Shares of the steps of `fidelity: balanced` and `fast` that are taken without LoRAs.

    A call with LoRAs may then ask for these modes, and begins while its LoRAs are fetched. What
    images lose is not measured when this is set: see [LoRAs](loras.md#begin-without-them).
    """

    balanced: float | None = Field(
        None, ge=0, lt=1, description="of `balanced`; null refuses it with LoRAs"
    )
    fast: float | None = Field(
        None, ge=0, lt=1, description="of `fast`; null refuses it with LoRAs"
    )

    def start(self) -> LoraStart:
        """Return it for policies."""
        return LoraStart(self.balanced, self.fast)


class PoolConfig(Hardware, WorkerConfig):
    """Replicas of one model on one kind of device: one Serve application."""

    model: str = Field(
        description="a built-in model, a folder in diffusers' layout, a hub id, or a "
        "checkpoint of SD1.5, SD2 or SDXL in one `.safetensors` file"
    )
    transformer: str | None = Field(
        None,
        description="a `.safetensors` or `.gguf` file that the transformer is taken from, in place "
        "of the one of the folder in `model`; null takes that",
    )
    prediction: Literal["epsilon", "v_prediction"] | None = Field(
        None,
        description="what a checkpoint in one file predicts; null takes what the file says, and "
        "`epsilon` where it says nothing (an SD2 file that says nothing is refused)",
    )
    served_as: str | None = Field(
        None,
        description="name of the model at the API; pools with the same name share a queue",
        json_schema_extra=CALLS,
    )
    engine: Literal["auto", "steps", "diffusers"] = Field(
        "auto",
        description="what runs the model: `steps`, the step engine (SD1.5, SD2, SDXL, SD3, FLUX.1),"
        " `diffusers`, a pipeline of that package as it is, one image a call ([any other "
        "pipeline](operations.md#any-other-pipeline)), or `auto`, the first where it covers the "
        "model",
    )
    dtype: NumberFormat | None = Field(
        None,
        description="number format; null takes float32 on a CPU, and on a GPU bfloat16, or float16 "
        "where it has none (compute capability below 8.0). A CPU without instructions for half "
        "precision computes it in float32 (`doctor` says so)",
    )
    ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that a replica's model runs on, each with all of its weights and a "
        "device of its own; above 1 a replica is a group, whose images each take a step on as many "
        "ranks as it pays for (diffusion transformers alone). `device`, `num_gpus`, `num_cpus`, "
        "`num_threads` and `memory_gib` are then a rank's",
    )
    degrees: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="numbers of a group's ranks that a step may run on, powers of two; null for "
        "all. Those that do not divide the model's heads are left out",
    )
    guard: Literal["large", "most"] = Field(
        "large",
        description="which images of a group are put behind the others where not all can be in "
        "time: `large` keeps as many as can be, and of those as large ones as can be; `most` gives "
        "up the largest first",
    )
    batches: Literal["mixed", "one-size"] = Field(
        "mixed",
        description="whether images of several sizes share a denoising step; `one-size` is for "
        "comparison with other engines, and predictions still assume `mixed`",
    )
    layout: Literal["auto", "mixed", "grouped"] = Field(
        "auto",
        description="whether the sizes of a step share one model call (`mixed`) or take one each "
        "(`grouped`); `auto` takes the faster one, by the steps so far",
    )
    min_px: int | None = Field(
        None, ge=8, description="shortest side of an image; null takes the model's own limit"
    )
    max_px: int | None = Field(
        None,
        ge=8,
        description="longest side; null takes twice the model's own size (`sample_size`), or the "
        "positions that it has if these are fewer",
    )
    max_references: int | None = Field(
        None,
        ge=0,
        le=16,
        description="pictures of an edit at most, where `diffusers` runs a model that looks at "
        "pictures; null takes what its family is made for",
    )
    max_num_inference_steps: int = Field(
        100, ge=1, description="denoising steps of a call at most", json_schema_extra=CALLS
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="memory of the device for a replica, on a GPU its CUDA context included, and a "
        "limit there; null for all that is free, on a GPU of the replica's part",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "off",
        description="whether steps on a GPU are replayed from CUDA graphs, which saves launches of "
        "kernels for small images; not run on a GPU yet: measure with `make bench-gpu`",
    )
    offload: Literal["auto", "never"] = Field(
        "auto",
        description="whether weights may stay in the machine's memory where a GPU's is short: the "
        "text encoders' first, then all; on a CPU it changes nothing",
    )
    max_in_flight: int = Field(
        16,
        ge=1,
        description="images that a replica holds at most, with those being encoded or decoded; at "
        "least `max_batch`",
        json_schema_extra=LIVE,
    )
    min_replicas: int = Field(
        1,
        ge=0,
        description="fewest replicas that a plan may choose; 0 stops the last one while nobody "
        "calls",
        json_schema_extra=LIVE,
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        description="most replicas that a plan may choose; null for no limit",
        json_schema_extra=LIVE,
    )
    defaults: DefaultsConfig = Field(DefaultsConfig(), json_schema_extra=LIVE)
    fidelity: FidelityConfig | None = Field(
        None,
        description="step counts of balanced and fast; null takes the measured ones of a built-in "
        "model, and refuses both for others",
        json_schema_extra=LIVE,
    )
    lora_start: LoraStartConfig | None = Field(
        None,
        description="shares of the steps of balanced and fast that are taken without LoRAs; null "
        "refuses both with LoRAs",
        json_schema_extra=LIVE,
    )

    @property
    def most_in_flight(self) -> int:
        return self.max_in_flight

    @property
    def num_processes(self) -> int:
        return self.ranks

    @property
    def step_batch(self) -> int:
        """Images that are stepped together at most; a group, or a call, steps each alone."""
        return 1 if self.is_group or self.engine == "diffusers" else self.max_batch

    @property
    def only_of_steps(self) -> list[str]:
        """Settings that are given, and that only the step engine knows."""
        given = {
            "ranks": self.is_group,
            "fidelity": self.fidelity is not None,
            "lora_start": self.lora_start is not None,
            "cuda_graphs": self.cuda_graphs != "off",
            "defaults.sampler": self.defaults.sampler is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def is_group(self) -> bool:
        """Whether a replica's model runs on several ranks."""
        return self.ranks > 1

    @property
    def set_degrees(self) -> tuple[int, ...]:
        """Numbers of ranks that a step may run on, rising."""
        if self.degrees is not None:
            return tuple(sorted(self.degrees))
        return tuple(2**power for power in range(self.ranks.bit_length()))

    @property
    def files(self) -> tuple[str, Literal["epsilon", "v_prediction"] | None, str | None]:
        """What its model is loaded from."""
        return self.model, self.prediction, self.transformer

    @property
    def files_words(self) -> str:
        """The same, for people."""
        return " with ".join(filter(None, (self.model, self.transformer)))

    @property
    def model_name(self) -> str:
        """Name of the model at the API."""
        return self.served_as or self.name

    @property
    def memory_bytes(self) -> int | None:
        """``memory_gib`` in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    def number_format(self, capability: Capability | None = None) -> NumberFormat | None:
        """Return the number format of a replica, None where that depends on a GPU not known here.

        Args:
            capability: the GPU's.
        """
        return self.dtype or default_format(self.device, capability)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "diffusers" and (given := self.only_of_steps):
            raise ValueError(
                f"{' and '.join(given)} cannot be set with engine: diffusers, which runs calls of "
                "a pipeline as they are; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        for degree in self.degrees or ():
            if degree < 1 or degree & (degree - 1) or degree > self.ranks:
                raise ValueError(
                    f"degrees has {degree}; allowed are powers of two of at most ranks, "
                    f"{self.ranks}"
                )
        if self.is_group and self.device == "cuda" and self.num_gpus != 1:
            raise ValueError(
                f"num_gpus is {self.num_gpus:g}, but each rank of a group has a GPU of its own: "
                "set num_gpus: 1"
            )
        return self

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_px is not None and self.max_px is not None and self.min_px > self.max_px:
            raise ValueError(f"min_px {self.min_px} is above max_px {self.max_px}")
        if self.step_batch > self.max_in_flight:
            raise ValueError(
                f"max_batch {self.max_batch} is above max_in_flight {self.max_in_flight}; "
                "raise max_in_flight or lower max_batch"
            )
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
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
                f"max_replicas {most}; change replicas, too (1 where it is left out)"
            )
        return self
