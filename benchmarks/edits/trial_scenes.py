"""Templates of the trial of masked edits, what is asked for in them, and edits of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ray_cluster.engine.edits.template import EncodedImage, latent_mask
from ray_cluster.engine.models.loading import LoadedModel, start_states
from ray_cluster.engine.step.mixed_step import prepare_rows
from ray_cluster.engine.step.step_call import Held
from ray_cluster.quality.render import render
from ray_cluster.quality.scenes import (
    COLOURS,
    SHAPES,
    Scene,
    SceneObject,
    is_held_out,
    sample_several,
    sample_single,
)
from ray_cluster.requests import BlobRef, Edit, ImageRequest

Grid = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Subject:
    """A template and what replaces one of its objects; the same in every call."""

    index: int
    scene: Scene
    target: int
    pixels: npt.NDArray[np.uint8]
    latents: Tensor

    def edited(self, ratio: float) -> Scene:
        """Return the scene that is asked for: another, held-out object in the target's place."""
        rng, old = random.Random(f"{self.index} {ratio}"), self.scene.objects[self.target]
        assert self.scene.background is not None
        some = [
            (shape, colour)
            for shape, colour in product(SHAPES, COLOURS)
            if shape != old.shape and colour != old.colour
            if is_held_out(shape, colour, self.scene.background)
        ]
        # a large one is larger than the smallest masks
        shape, colour = rng.choice(some)
        new = replace(old, shape=shape, colour=colour, size="small" if ratio < 0.2 else "large")
        objects = list(self.scene.objects)
        objects[self.target] = new
        return replace(self.scene, objects=tuple(objects))

    def wanted(self, ratio: float) -> SceneObject:
        """Return the object that is asked for."""
        return self.edited(ratio).objects[self.target]

    def mask(self, ratio: float) -> Grid:
        """Return a square around the target, ``[px, px]``, shifted to lie in the image."""
        px, position = len(self.pixels), self.scene.objects[self.target].position
        side, found = round(px * ratio**0.5), np.zeros(self.pixels.shape[:2], np.bool_)
        assert position is not None
        row = 0.5 + 0.24 * (("bottom" in position) - ("top" in position))
        column = 0.5 + 0.24 * (("right" in position) - ("left" in position))
        top, left = (min(max(0, round(at * px - side / 2)), px - side) for at in (row, column))
        found[top : top + side, left : left + side] = True
        return found

    def request(self, model: LoadedModel, prompt: str, steps: int, scale: float) -> ImageRequest:
        """Return the request of an edit of it."""
        px, blob = len(self.pixels), BlobRef(hashlib.sha256(self.pixels.tobytes()).hexdigest(), 1)
        return ImageRequest(
            request_id=f"{self.index}",
            model="trial",
            prompt=prompt,
            width_px=px,
            height_px=px,
            num_steps=steps,
            guidance_scale=scale,
            sampler=model.profile.default_sampler,
            seed=5000 + self.index,
            edit=Edit(blob, (px, px), steps, mask=blob),
        )


def subjects(model: LoadedModel, px: int, num_edits: int) -> list[Subject]:
    """Return templates, half of them of one small object, half of several."""
    found = []
    for index in range(num_edits):
        rng = random.Random(f"trial {index}")
        scene = sample_several(rng) if index % 2 else sample_single(rng)
        target = rng.randrange(len(scene.objects))
        objects = list(scene.objects)
        objects[target] = replace(objects[target], size="small")
        scene = replace(scene, objects=tuple(objects))
        [image] = render([scene], width=px, height=px)
        pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
        found.append(Subject(index, scene, target, pixels, model.images.encode([pixels])[0]))
    return found


def held(
    model: LoadedModel, edits: Sequence[Subject], prompts: Sequence[str], masks: Sequence[Grid],
    steps: int, scale: float,
) -> list[Held]:  # fmt: skip
    """Return edits before their first step."""
    some = [
        one.request(model, prompt, steps, scale) for one, prompt in zip(edits, prompts, strict=True)
    ]
    factor = model.images.factor
    images = [
        EncodedImage(one.latents, latent_mask(mask, factor))
        for one, mask in zip(edits, masks, strict=True)
    ]
    states = start_states(model, some, now_s=0.0, images=images)
    rows = [Held(state, model.tables.of(state.request), 0) for state in states]
    prepare_rows(rows, model.executor)
    return rows
