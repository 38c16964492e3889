"""The state of one request between two denoising steps, and its portable form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ray_cluster.engine.edits.template import EncodedImage, Template
from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.errors import MODEL_ERRORS
from ray_cluster.policies.steps.previews import preview_steps
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.requests import ImageRequest
from ray_cluster.storage.state_format import (
    StateHeader,
    header_of,
    header_text,
    unwrapped,
    wrapped,
)

_UNPACK_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, SafetensorError)
_PREFIX = "conditioning."
_REFERENCE = "reference."
_TEMPLATE_PREFIX = "template."


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What a request's steps are conditioned on, most of it its prompts; fixed for the whole run.

    Attributes:
        prompt_embeds: ``[T, D]``.
        negative_embeds: ``[T, D]``, only with guidance.
        pooled_embeds: ``[P]``, only for models with added conditions (SDXL, SD3, FLUX).
        negative_pooled_embeds: ``[P]``, likewise, only with guidance.
        time_ids: ``[6]``, original size, crop and target size (SDXL).
        references: ``[C, h, w]`` float32 each, latents of the pictures that the model looks at.
    """

    prompt_embeds: Tensor
    negative_embeds: Tensor | None = None
    pooled_embeds: Tensor | None = None
    negative_pooled_embeds: Tensor | None = None
    time_ids: Tensor | None = None
    references: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Conditioning:
        """Return what :meth:`tensors` returned the tensors of."""
        named = {name: one for name, one in tensors.items() if not name.startswith(_REFERENCE)}
        seen = (tensors[f"{_REFERENCE}{index}"] for index in range(len(tensors) - len(named)))
        return cls(**named, references=tuple(seen))

    @property
    def is_guided(self) -> bool:
        """Whether every step takes a second, unconditional model row."""
        return self.negative_embeds is not None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name: of its field, or of its place in one."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "references"}
        fields |= {f"{_REFERENCE}{index}": one for index, one in enumerate(self.references)}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class FullStep:
    """The last step of a request that was computed whole: from this, it can be computed again.

    Attributes:
        step_index: which it was.
        latents: ``[C, H, W]`` float32, with which it began.
    """

    step_index: int
    latents: Tensor


@dataclass(slots=True)
class RequestState:
    """One request in flight, owned by one engine at a time.

    Attributes:
        latents: ``[C, H, W]`` float32 in the sampler's own scale.
        denoised: ``[C, H, W]``, the last step's estimate of the clean latents; the history of
            two-step samplers, and what a preview shows. Zeros before the first step.
        step_index: model calls already made: denoising steps, and one more with ``pndm``.
        generator: the request's own noise source.
        arrival_s: instant at which the service got the request, on the engine's clock.
        deadline_s: instant on the engine's clock.
        encode_s: seconds from submission to the first step's queue.
        denoise_s: seconds from there to the last step, here and in earlier replicas.
        queued_s: seconds before the first replica had it.
        reuse: which of its steps are computed whole; None for all.
        full_step: the last of these, of a request with such a schedule.
        num_reused: steps in which it has taken anything from an earlier one.
        template: of an edit; None for text to image.
        outputs: ``[k, C, H, W]``, the model's last outputs, the newest first, of a request whose
            sampler takes more steps of history than one.
        stored_steps: steps contained in the last copy of it; no part of the portable form.
        maps: ``[H, W, 3]`` uint8 each, that its ControlNets follow, on the CPU; likewise: whoever
            goes on with it reads them anew.
        lacks_loras: whether its conditioning is that without its LoRAs, which come after its
            request's first steps.
        steps_by_degree: steps that it has taken on a group, by the ranks of each.
    """

    request: ImageRequest
    conditioning: Conditioning
    latents: Tensor
    denoised: Tensor
    step_index: int
    generator: torch.Generator
    arrival_s: float
    deadline_s: float
    queued_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    reuse: ReuseSchedule | None = None
    full_step: FullStep | None = None
    num_reused: int = 0
    template: Template | None = None
    outputs: Tensor | None = None
    stored_steps: int = 0
    maps: tuple[Tensor, ...] = ()
    lacks_loras: bool = False
    steps_by_degree: dict[int, int] = field(default_factory=dict)

    @property
    def unstored_steps(self) -> int:
        """Steps that would be lost with it."""
        return self.step_index - self.stored_steps

    @property
    def is_preview_due(self) -> bool:
        """Whether its request wants to be shown after the step that it has just taken."""
        num_previews = self.request.output.num_previews
        return num_previews > 0 and self.step_index in preview_steps(
            self.request.num_steps, num_previews
        )

    @classmethod
    def start(
        cls,
        request: ImageRequest,
        conditioning: Conditioning,
        *,
        latent_shape: tuple[int, int, int],
        table: SamplerTable,
        arrival_s: float,
        deadline_s: float,
        image: EncodedImage | None = None,
    ) -> RequestState:
        """Return the state before the first step, its noise drawn from the request's seed.

        Noise is drawn on the CPU as diffusers does with a CPU generator, so that the image does
        not depend on the device.

        Args:
            image: of an edit.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        noise = torch.randn((1, *latent_shape), generator=generator)[0]
        device = conditioning.prompt_embeds.device
        template = None
        if request.edit is not None:
            assert image is not None, "an edit's image is encoded before its first step"
            template = Template.of(request.edit, image, noise)
            latents = template.start(table, request.edit.strength)
        else:
            latents = (noise * table.init_noise_sigma).to(device)
        return cls(
            request=request,
            conditioning=conditioning,
            latents=latents,
            denoised=torch.zeros_like(latents),
            step_index=0,
            generator=generator,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            reuse=None if request.reuse is None else request.reuse.schedule,
            template=template,
            lacks_loras=request.add_ons.lora_start_step > 0,
        )

    @property
    def estimate(self) -> Tensor:
        """The present estimate of the clean latents, which a preview shows, ``[C, H, W]``."""
        if self.template is None or not self.template.is_blended:
            return self.denoised
        return self.template.blended(self.denoised, (1.0, 0.0))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all of its tensors."""
        full_step = None if self.full_step is None else self.full_step.latents
        own = (self.latents, self.denoised, self.outputs, full_step)
        kept = tuple(tensor for tensor in own if tensor is not None)
        template = {} if self.template is None else self.template.tensors()
        return (*kept, *self.conditioning.tensors().values(), *template.values())

    def copy(self) -> RequestState:
        """Return a state that stays as it is while this one takes steps.

        Conditioning, template and outputs never change and are shared.
        """
        return replace(
            self,
            latents=self.latents.clone(),
            denoised=self.denoised.clone(),
            generator=self.generator.clone_state(),
            steps_by_degree=dict(self.steps_by_degree),
        )

    def to_bytes(self, model_digest: str = "") -> bytes:
        """Return everything needed to go on elsewhere: checksummed safetensors with a header.

        Args:
            model_digest: of the model that its steps were done with.
        """
        tensors = {_PREFIX + name: t for name, t in self.conditioning.tensors().items()}
        if self.template is not None:
            own = self.template.tensors()
            tensors |= {_TEMPLATE_PREFIX + name: tensor for name, tensor in own.items()}
        tensors |= {"latents": self.latents, "denoised": self.denoised}
        tensors["generator"] = self.generator.get_state()
        if self.full_step is not None:
            tensors["full_step"] = self.full_step.latents
        if self.outputs is not None:
            tensors["outputs"] = self.outputs
        header = StateHeader(
            request=self.request,
            step_index=self.step_index,
            model_digest=model_digest,
            queued_s=self.queued_s,
            encode_s=self.encode_s,
            denoise_s=self.denoise_s,
            reuse=self.reuse,
            full_step=None if self.full_step is None else self.full_step.step_index,
            num_reused=self.num_reused,
            lacks_loras=self.lacks_loras,
            steps_by_degree=tuple(sorted(self.steps_by_degree.items())),
        )
        packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return wrapped(save_tensors(packed, metadata={"state": header_text(header)}))

    @classmethod
    def from_bytes(
        cls, data: bytes, *, device: torch.device | str, arrival_s: float, deadline_s: float
    ) -> RequestState:
        """Rebuild a state written by :meth:`to_bytes`; instants are on the new engine's clock.

        Raises:
            ValueError: the bytes are damaged, or not a request state of this version.
        """
        body = unwrapped(data)
        try:
            return cls._unpack(header_of(data), body, device, arrival_s, deadline_s)
        except _UNPACK_ERRORS as error:
            raise ValueError(f"not a request state of this version: {error!r}") from error

    @classmethod
    def _unpack(
        cls,
        header: StateHeader,
        body: bytes,
        device: torch.device | str,
        arrival_s: float,
        deadline_s: float,
    ) -> RequestState:
        tensors = {name: tensor.to(device) for name, tensor in load_tensors(body).items()}
        generator = torch.Generator("cpu")
        generator.set_state(tensors.pop("generator").cpu())
        template = None
        if header.request.edit is not None:
            template = Template(**_without_prefix(tensors, _TEMPLATE_PREFIX))
        full_step = header.full_step
        return cls(
            request=header.request,
            conditioning=Conditioning.of(_without_prefix(tensors, _PREFIX)),
            template=template,
            reuse=header.reuse,
            full_step=None if full_step is None else FullStep(full_step, tensors["full_step"]),
            num_reused=header.num_reused,
            lacks_loras=header.lacks_loras,
            steps_by_degree=dict(header.steps_by_degree),
            latents=tensors["latents"],
            denoised=tensors["denoised"],
            outputs=tensors.get("outputs"),
            step_index=header.step_index,
            generator=generator,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            queued_s=header.queued_s,
            encode_s=header.encode_s,
            denoise_s=header.denoise_s,
            stored_steps=header.step_index,
        )


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
