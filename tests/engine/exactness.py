"""Requests of all kinds, and how near to diffusers a whole run must be."""

from __future__ import annotations

from dataclasses import replace

import torch

from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.harness import RUN_TOLERANCE, difference, request
from tests.engine.reference import Reference

GUIDANCE = {
    "unguided": {"guidance_scale": 1.0},
    "guided": {"guidance_scale": 3.0},
    "guided, negative prompt": {"guidance_scale": 5.5, "negative_prompt": "blue square"},
}


def variety(**changes: object) -> list[ImageRequest]:
    """One request per sampler and kind of guidance, all of different steps, prompts and seeds."""
    requests = []
    for sampler in SAMPLER_NAMES:
        for guidance in GUIDANCE.values():
            index = len(requests)
            one = request(
                f"r{index}",
                sampler=sampler,
                prompt=f"a red circle {'large ' * index}",
                num_steps=3 + index % 6,
                seed=100 + index,
                **guidance,
            )
            requests.append(replace(one, **changes))
    return requests


def check(reference: Reference, one: ImageRequest, latents: torch.Tensor) -> float:
    """Hold a whole run against the bounds of docs/engine.md; return the error.

    Where diffusers rounds away more than that, the engine may be nearer to the truth instead.
    """
    expected = reference.outcome(one).latents
    error = difference(latents, expected)
    if error <= RUN_TOLERANCE:
        return error
    if one.sampler.startswith("euler") and reference.starts_at_zero_snr:
        truth = reference.truth(one)
        if difference(latents, truth) <= difference(expected, truth):
            return difference(latents, truth)
    assert error <= reference.run_tolerance(one), (one, error)
    return error
