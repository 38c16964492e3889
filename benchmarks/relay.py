"""Whether a heavy model gains by going on from a light image: ``python -m benchmarks.relay``.

A cascade's heavy model may begin with the light image's latents instead of noise (RISE: a relay),
and take only the last steps of its schedule. The control is the same number of steps from noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.machine import describe_run, load_now
from benchmarks.progress import wide_console
from benchmarks.report import Section, as_json, print_sections
from benchmarks.run import RESULTS
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.edits.template import EncodedImage
from ray_cluster.engine.models.loading import LoadedModel, load_model, start_states
from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.imaging.small_images import small_image
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.requests import BlobRef, Edit, ImageRequest
from ray_cluster.training.figures.scoring import Drawn
from ray_cluster.training.figures.suite import Kind, SuitePrompt, suite_prompts

_LIGHT, _HEAVY, _JUDGE = "shapes-sd-light", "shapes-sd", "shapes-discriminator"
_KINDS: tuple[Kind, ...] = ("easy", "hard")
_PROMPTS, _QUICK = 300, 8
_BATCH = 16
_SIDE_PX = 64
# those of configs/cascade.yaml
_LIGHT_STEPS, _STEPS, _THRESHOLD = 2, 20, 0.5
_FEWER = (16, 12, 10, 8, 6, 4)
_RESAMPLES = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the images in all ways, and judge them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.relay")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    options, started = parser.parse_args(arguments), datetime.now(UTC)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-relay.json"
    torch.set_num_threads(1)
    result = describe_run("ray-cluster relay 1", quick=options.quick, started=started)
    count = _QUICK if options.quick else _PROMPTS
    prompts = [one for kind in _KINDS for one in suite_prompts(kind, count)]
    section = study(prompts)
    result |= {"load_after": load_now(), "sections": {"relay": section}}
    path.write_text(as_json(result), encoding="utf-8")
    print_sections(wide_console(), result["sections"], quick=options.quick)
    print(f"written: {path}")
    return 0


def study(prompts: Sequence[SuitePrompt]) -> Section:
    """Return the share that is all right of the images that a cascade would make anew."""
    light, heavy = (_loaded(name) for name in (_LIGHT, _HEAVY))
    with Progress(console=wide_console()) as progress:
        made = _made(light, prompts, _LIGHT_STEPS, progress=progress, guidance_scale=1.0)
        confidences = load_scorer(_JUDGE, torch.device("cpu")).score(
            [one.caption for one in prompts], [small_image(one) for one in _pixels(light, made)]
        )
        chosen = [index for index, one in enumerate(confidences) if one < _THRESHOLD]
        deferred, latents = [prompts[one] for one in chosen], [made[one] for one in chosen]
        whole = _right(heavy, deferred, _made(heavy, deferred, _STEPS, progress=progress))
        rows = [
            {
                "way": "the light image",
                "steps": _LIGHT_STEPS,
                **_share(_right(light, deferred, latents)),
            },
            {"way": "from noise", "steps": _STEPS, **_share(whole)},
        ]
        for steps in _FEWER:
            plain = _right(heavy, deferred, _made(heavy, deferred, steps, progress=progress))
            relayed = _made(heavy, deferred, steps, begins=latents, progress=progress)
            relay = _right(heavy, deferred, relayed)
            rows += [
                {"way": "from noise", "steps": steps, **_share(plain)},
                {"way": "relay", "steps": steps, **_share(relay), **_gain(relay, plain)},
            ]
    return {
        "what": f"{len(deferred)} of {len(prompts)} prompts of the suite, half of them easy, whose "
        f"light image has a confidence below {_THRESHOLD:g}; share of the heavy model's images "
        "that are all right, by how it begins and how many steps it takes",
        "tables": {"relay": rows},
        "aims": [],
    }


def _loaded(name: str) -> LoadedModel:
    return load_model(PoolConfig(name="m", model=name, max_px=128))


@torch.inference_mode()
def _made(
    model: LoadedModel,
    prompts: Sequence[SuitePrompt],
    num_steps: int,
    *,
    progress: Progress,
    begins: Sequence[Tensor] = (),
    guidance_scale: float = 2.0,
) -> list[Tensor]:
    """Return final latents ``[C, h, w]`` of the prompts.

    Args:
        begins: the latents that a relay begins with, for the last steps of the whole schedule.
    """
    task = progress.add_task(
        f"{'relay' if begins else 'noise'}, {num_steps} steps", total=len(prompts)
    )
    found: list[Tensor] = []
    for start in range(0, len(prompts), _BATCH):
        part = prompts[start : start + _BATCH]
        requests = [_request(model, one, num_steps, guidance_scale) for one in part]
        images: list[EncodedImage | None] = [None] * len(part)
        if begins:
            edit = Edit(
                BlobRef("0" * 64, 0), (_SIDE_PX, _SIDE_PX), _STEPS, strength=num_steps / _STEPS
            )
            requests = [replace(one, edit=edit) for one in requests]
            images = [EncodedImage(one) for one in begins[start : start + _BATCH]]
        states = start_states(model, requests, now_s=0.0, images=images)
        engine = StepEngine(model.executor, _all, model.tables, time.monotonic)
        for state in states:
            engine.add(state)
        while len(engine):
            engine.step()
        found += [state.latents for state in states]
        progress.advance(task, len(part))
    return found


def _all(rows: Sequence[Any], _now_s: float) -> list[str]:
    return [row.request.request_id for row in rows]


def _request(
    model: LoadedModel, prompt: SuitePrompt, num_steps: int, guidance_scale: float
) -> ImageRequest:
    return ImageRequest(
        request_id=f"{prompt.kind}-{prompt.index}",
        model=model.profile.model,
        prompt=prompt.caption,
        width_px=_SIDE_PX,
        height_px=_SIDE_PX,
        num_steps=num_steps,
        guidance_scale=guidance_scale,
        sampler="ddim",
        seed=prompt.noise_seed(),
    )


@torch.inference_mode()
def _pixels(model: LoadedModel, latents: Sequence[Tensor]) -> list[Any]:
    return [one for latent in latents for one in model.decoder.decode([latent])]


def _right(model: LoadedModel, prompts: Sequence[SuitePrompt], latents: Sequence[Tensor]) -> Any:
    """Return which images are all right, ``[N]`` bool."""
    pixels = torch.from_numpy(np.stack(_pixels(model, latents))).permute(0, 3, 1, 2).float() / 255
    readings = read_pictures(load_classifier(), pixels)
    drawn = zip(prompts, pixels, readings, strict=True)
    return np.array(
        [Drawn(one.scene, picture, reading).all_right for one, picture, reading in drawn]
    )


def _share(right: Any) -> dict[str, float]:
    return {"all_right": float(right.mean())}


def _gain(relay: Any, plain: Any) -> dict[str, Any]:
    """Return by how many points a relay is above the control, with a 95 % interval."""
    rng = np.random.default_rng(0)
    gains = 100 * (relay.astype(float) - plain)
    drawn = [rng.choice(gains, len(gains)).mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"gain_points": float(gains.mean()), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    sys.exit(main())
