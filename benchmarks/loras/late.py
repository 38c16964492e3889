"""How far images whose LoRAs start late are from those that have them from the first step on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.loras.settings import LoraSettings
from benchmarks.loras.subject import read_styles
from benchmarks.report import Row, Section
from benchmarks.settings import Report
from benchmarks.verdicts import at_least
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.models.loading import start_states
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.step.step_call import LateLoras
from ray_cluster.policies.fidelity import LEAST_SSIM, Fidelity
from ray_cluster.quality.calibration import as_pictures
from ray_cluster.quality.distances import similarity
from ray_cluster.quality.suite import suite_prompts
from ray_cluster.requests import AddOns, ImageRequest

_GUIDANCE = 2.0
# by docs/loras.md
_ADVISED: Mapping[Fidelity, float] = {"balanced": 0.15, "fast": 0.3}
Pictures = npt.NDArray[np.uint8]


def measure(settings: LoraSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject = load_subject()
    sets = {name: bind_adapters(subject.model, [(one, 1.0)]) for name, one in read_styles().items()}
    steps = _steps(subject, settings.num_steps)
    rows: list[Row] = []
    for index, (style, own) in enumerate(sets.items()):
        report(index / len(sets), style)
        requests = _requests(settings)
        exact = _images(subject, requests, own)
        for mode, num_steps in steps.items():
            for share in (0.0, *settings.late_shares):
                start = int(share * num_steps)
                if (mode, start) == ("exact", 0):
                    continue
                late = [_late(one, num_steps, start) for one in requests]
                found = similarity(as_pictures(_images(subject, late, own)), as_pictures(exact))
                rows.append(
                    {
                        "lora": style,
                        "steps_of": mode,
                        "steps": num_steps,
                        "without_percent": 100 * share,
                        "without": start,
                        "worst_ssim": float(found.min()),
                        "mean_ssim": float(found.mean()),
                    }
                )
    aims = []
    for mode, share in _ADVISED.items():
        worst = [
            float(row["worst_ssim"])
            for row in rows
            if row["steps_of"] in {"exact", mode} and row["without_percent"] == 100 * share
        ]
        if worst:
            name = f"worst SSIM of {mode}, first {100 * share:g} % of the steps without LoRAs"
            aims.append(
                at_least(name, LEAST_SSIM[mode], min(worst), (min(worst),) * 2, "").as_dict()
            )
    return {
        "what": f"images of {settings.px} px, {settings.late_images} prompts, guidance "
        f"{_GUIDANCE:g}, against those of {settings.num_steps} steps with the LoRA in all; with "
        "all steps, and with the fewer ones of balanced and fast",
        "tables": {"late LoRAs": rows},
        "aims": aims,
    }


def _steps(subject: Subject, asked: int) -> Mapping[str, int]:
    """Return the steps of each mode; of an exact image those asked for."""
    table = subject.model.profile.fewer_steps
    known = None if table is None else table.row(asked)
    if known is None:
        return {"exact": asked}
    return {"exact": asked, "balanced": known.balanced, "fast": known.fast}


def _requests(settings: LoraSettings) -> list[ImageRequest]:
    made = make_requests(
        settings.late_images,
        px=settings.px,
        num_steps=settings.num_steps,
        guidance_scale=_GUIDANCE,
    )
    half = len(made) // 2
    prompts = (*suite_prompts("easy", half), *suite_prompts("hard", len(made) - half))
    return [replace(one, prompt=own.caption) for one, own in zip(made, prompts, strict=True)]


def _late(request: ImageRequest, num_steps: int, start: int) -> ImageRequest:
    return replace(request, num_steps=num_steps, add_ons=AddOns(lora_start_step=start))


@torch.inference_mode()
def _images(subject: Subject, requests: Sequence[ImageRequest], own: AdapterSet) -> Pictures:
    """Make images with a LoRA, all with the same number of steps; ``[B, H, W, 3]``."""
    model = subject.model
    engine = build_engine(model, max_batch=16, clock=lambda: 0.0)
    is_late = requests[0].add_ons.lora_start_step > 0
    prompts = [None if is_late else own.prompts] * len(requests)
    states = start_states(model, requests, now_s=0.0, deltas=prompts)
    later: Sequence[Conditioning | None] = [None] * len(requests)
    if is_late and own.prompts is not None:
        later = model.encoder.encode(requests, [own.prompts] * len(requests))
    for state, conditioning in zip(states, later, strict=True):
        engine.add(state, None if is_late else own.denoiser)
        if is_late:
            engine.add_loras(state, LateLoras(own.denoiser, conditioning))
    while engine.can_step:
        failed = engine.step().failed
        if failed:
            raise failed[0].error
    return np.stack([image for one in states for image in model.decoder.decode([one.latents])])
