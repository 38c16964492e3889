"""Whether our executor computes what diffusers does, before anything is timed.

One model call over images of several sizes, at different timesteps, with guidance and without,
against diffusers image by image, with the same random weights.

- float32: within 2e-5 of diffusers, relative to the largest value where that is above 1, or within
  four times the difference between diffusers at batch 1 and at batch 4 for the same image.
- The deployment's dtype (bfloat16): against the float32 prediction of the same weights the norm of
  our error may be 1.5 times that of diffusers' own.
- Negative controls, each with another request's timestep or prompt, must fail both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.families import Family
from benchmarks.gpu.kernels import relative_error
from benchmarks.gpu.pipeline import Denoiser, Prompts
from benchmarks.gpu.record import Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.subject import Contest, conditionings, executor_of, free_memory
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning

_CALL_TOLERANCE = 2e-5
_SELF_FACTOR = 4.0
_TRUTH_FACTOR = 1.5
_CONTROL_FACTOR = 100.0
_SELF_BATCH = 4
# multiples of 8: bfloat16 has them
_TIMESTEPS = (904.0, 504.0, 104.0, 304.0)


@dataclass(frozen=True, slots=True)
class Call:
    """A model call: latents ``[C, h, w]``, timesteps and prompts of several images."""

    latents: tuple[Tensor, ...]
    timesteps: tuple[float, ...]
    owned: tuple[Conditioning, ...]
    scale: float

    @property
    def wrong_timestep(self) -> Call:
        """The call with the timesteps of other images."""
        return replace(self, timesteps=(*self.timesteps[1:], self.timesteps[0]))

    @property
    def wrong_prompt(self) -> Call:
        """The call with the prompts of other images, and as many rows for each as before."""
        swapped = [self.owned[index ^ 2] for index in range(len(self.owned))]
        return replace(self, owned=tuple(swapped))

    @property
    def variants(self) -> dict[str, Call]:
        """The call and the negative controls, by name."""
        wrong = {"wrong timestep": self.wrong_timestep, "wrong prompt": self.wrong_prompt}
        return {"ours": self, **wrong}

    def spread(self, index: int) -> float:
        """Return by how much guidance multiplies the errors of an image's rows."""
        return 2 * self.scale - 1 if self.owned[index].is_guided else 1.0


def make_call(settings: Settings, denoiser: Denoiser) -> Call:
    """Return the call of the checks; its values are those that the dtype has."""
    guided = [denoiser.family.is_guided and index % 2 == 1 for index in range(4)]
    generator = torch.Generator().manual_seed(7)
    shapes = [denoiser.family.latent_shape(size) for size in settings.exactness_px]
    latents = [torch.randn(shape, generator=generator).to(settings.dtype) for shape in shapes]
    return Call(
        tuple(one.to(denoiser.device, torch.float32) for one in latents),
        _TIMESTEPS,
        tuple(conditionings(denoiser, settings.exactness_px, guided)),
        denoiser.family.guidance_scale,
    )


def by_diffusers(denoiser: Denoiser, call: Call, index: int, batch: int = 1) -> Tensor:
    """Return what diffusers predicts for one image, in a batch of copies of it, float32."""
    latents = torch.stack([call.latents[index]] * batch)
    times = torch.tensor([call.timesteps[index]] * batch, device=denoiser.device)
    owned = [call.owned[index]] * batch
    wanted = denoiser(latents, times, Prompts.of(owned, "prompt")).float()
    if owned[0].is_guided:
        blank = denoiser(latents, times, Prompts.of(owned, "negative")).float()
        wanted = blank + call.scale * (wanted - blank)
    return wanted[0]


def by_ours(executor: Any, call: Call) -> list[Tensor]:
    """Return what our executor predicts, all images in one call."""
    sizes = [
        (*image.shape[1:], owned.is_guided)
        for image, owned in zip(call.latents, call.owned, strict=True)
    ]
    composition, order = composition_of(sizes)
    layout, device = layout_of(composition, executor.num_levels), executor.device
    batch = StepBatch(
        layout,
        torch.cat([call.latents[index].permute(1, 2, 0).flatten(0, 1) for index in order]),
        torch.tensor([call.timesteps[index] for index in order], device=device),
        tuple(executor.prepare(call.owned[index]) for index in order),
        torch.full((len(order),), call.scale, device=device),
    )
    output = executor.decode_half(executor.encode_half(batch))
    parts = dict(zip(order, output.split(layout.request_tokens), strict=True))
    return [
        parts[index].unflatten(0, image.shape[1:]).permute(2, 0, 1)
        for index, image in enumerate(call.latents)
    ]


@torch.inference_mode()
def check_exactness(settings: Settings, model: Any, family: Family, section: Section) -> Contest:
    """Check both dtypes; return both sides in the deployment's, ready to be timed.

    The model is in that dtype before and after; between, it is in float32 for the truth.
    """
    # cuDNN may use TF32 or Winograd's algorithm, which round more than everything else together;
    # without it convolutions are matrix products in float32
    with torch.backends.cudnn.flags(enabled=False):
        truth = _check_float32(settings, model.float(), family, section)
    denoiser = Denoiser(family, model.to(settings.dtype))
    free_memory(settings.device)
    contest = Contest(family, denoiser, executor_of(family, model))
    call = make_call(settings, denoiser)
    indices = range(len(call.latents))
    theirs = torch.cat([by_diffusers(denoiser, call, i).flatten() for i in indices])
    for name, found in (("float32", truth), (str(settings.dtype), theirs)):
        if not torch.isfinite(found).all():
            # it shows neither right nor wrong
            section.fail(f"diffusers' own prediction in {name} is not finite")
    allowed = _TRUTH_FACTOR * relative_error(theirs, truth)
    errors = {
        name: relative_error(_flat(by_ours(contest.executor, one)), truth)
        for name, one in call.variants.items()
    }
    _judge(section, str(settings.dtype), errors, allowed, control=1.0)
    return contest


def _check_float32(settings: Settings, model: Any, family: Family, section: Section) -> Tensor:
    """Check in float32; return diffusers' predictions of all images, flat."""
    denoiser = Denoiser(family, model)
    executor = executor_of(family, model) if _has_room(settings, model, section) else None
    call = make_call(settings, denoiser)
    expected = [by_diffusers(denoiser, call, index) for index in range(len(call.latents))]
    truth = _flat(expected)
    if executor is None:
        return truth
    apart = _gap([by_diffusers(denoiser, call, 0, _SELF_BATCH)], expected[:1], call)
    largest = max(float(one.abs().max()) / call.spread(i) for i, one in enumerate(expected))
    allowed = max(_CALL_TOLERANCE * max(1.0, largest), _SELF_FACTOR * apart)
    errors = {
        name: _gap(by_ours(executor, one), expected, call) for name, one in call.variants.items()
    }
    _judge(section, "torch.float32", errors, allowed, control=_CONTROL_FACTOR)
    return truth


def _judge(
    section: Section, dtype: str, errors: dict[str, float], allowed: float, control: float
) -> None:
    """Note every error; ours may be as large as allowed, those of controls must be larger."""
    for name, error in errors.items():
        is_ours = name == "ours"
        limit = allowed if is_ours else control * allowed
        is_right = error <= limit if is_ours else error > limit
        row = {"dtype": dtype, "prediction": name, "error": error, "limit": limit}
        section.table("errors").append(row | {"is_right": is_right})
        if not is_right:
            wanted = "at most" if is_ours else "as a negative control more than"
            section.fail(f"{dtype}: '{name}' is off by {error:g}, wanted {wanted} {limit:g}")


@torch.inference_mode()
def check_graphs(settings: Settings, contest: Contest, section: Section) -> None:
    """Check that a replayed graph gives what the executor gives, for inputs of its own."""
    if settings.device.type != "cuda":
        section.leave_out("CUDA graphs", f"there are none on {settings.device}")
        return
    executor, graphed = contest.executor, GraphedExecutor(contest.executor)
    call = make_call(settings, contest.denoiser)
    other = replace(call.wrong_prompt, timesteps=call.wrong_timestep.timesteps)
    errors = []
    for one in (call, other, call):
        found, expected = _flat(by_ours(graphed, one)), _flat(by_ours(executor, one))
        errors.append(relative_error(found, expected))
    stale = relative_error(_flat(by_ours(graphed, other)), _flat(by_ours(executor, call)))
    section.found["num_graphs"] = graphed.num_graphs
    # the same kernels on the same numbers; a library may still choose another one in a capture
    allowed = 1e-3
    section.table("relative errors").append(
        {"replayed": errors, "of_other_inputs": stale, "allowed": allowed}
    )
    if not max(errors) <= allowed:
        section.fail(f"a replayed graph differs from the executor by {errors}, allowed {allowed}")
    if not stale > allowed:
        section.fail(f"the graph's inputs change nothing: other ones differ by {stale:g} only")


def _has_room(settings: Settings, model: Any, section: Section) -> bool:
    """Whether another copy of the weights fits, with a quarter more for activations."""
    if settings.device.type != "cuda":
        return True
    free_memory(settings.device)
    free, _ = torch.cuda.mem_get_info(settings.device)
    needed: int = sum(one.nbytes for one in model.parameters()) * 5 // 4
    if free < needed:
        section.leave_out(
            "our executor in float32",
            f"a second copy of the weights takes {needed / 2**30:.0f} GiB, {free / 2**30:.0f} free",
        )
    return free >= needed


def _flat(images: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in images])


def _gap(found: Sequence[Tensor], expected: Sequence[Tensor], call: Call) -> float:
    """Return the largest difference, in terms of one model row; 1e9 for what is not finite."""
    gaps = [
        float(((one - other).abs().max() / call.spread(i)).nan_to_num(1e9, posinf=1e9))
        for i, (one, other) in enumerate(zip(found, expected, strict=True))
    ]
    return max(gaps)
