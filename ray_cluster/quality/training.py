"""Trains the attribute classifier on renders, with the loop that trains the reference model."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.quality.classifier import AttributeClassifier
from ray_cluster.quality.examples import (
    IGNORED,
    Examples,
    blends,
    blobs,
    empty_backgrounds,
    gradients,
    joined,
    noises,
    several_objects,
    single_objects,
    spoil,
)
from ray_cluster.reference_models.recipe import ClassifierRecipe, Recipe
from ray_cluster.reference_models.trainer import Trainer, step_seed

NONE_KINDS: dict[str, Callable[..., Examples]] = {
    "blob": blobs,
    "blend": blends,
    "several": several_objects,
    "empty": empty_backgrounds,
    "noise": noises,
    "gradient": gradients,
}


def draw_examples(rng: random.Random, recipe: ClassifierRecipe) -> Examples:
    """Draw one batch: a bucket's size, mostly one-object pictures, the rest pictures of nothing."""
    bucket = rng.choices(recipe.buckets, [bucket.share for bucket in recipe.buckets])[0]
    size = {"width": bucket.width, "height": bucket.height}
    counts = {kind: max(1, round(share * bucket.batch)) for kind, share in recipe.none_shares}
    rest = bucket.batch - sum(counts.values())
    parts = [single_objects(rng, rest, **size, jitter=recipe.jitter)]
    parts += [NONE_KINDS[kind](rng, count, **size) for kind, count in counts.items()]
    drawn = joined(parts)
    return Examples(spoil(drawn.pixels, recipe, rng), drawn.labels)


def classifier_trainer(recipe: Recipe) -> Trainer:
    """The stage that trains the classifier; no generated picture ever takes part."""
    options = recipe.classifier
    torch.manual_seed(step_seed(recipe.seed, "classifier", -1))
    classifier = AttributeClassifier(options.channels)

    def loss(index: int) -> Tensor:
        rng = random.Random(step_seed(recipe.seed, "classifier", index))
        examples = draw_examples(rng, options)
        logits, labels = classifier(examples.pixels), examples.labels
        parts = [
            F.cross_entropy(getattr(logits, name), getattr(labels, name), ignore_index=IGNORED)
            for name in ("shape", "colour", "size", "background")
        ]
        known = ~labels.centre.isnan().any(1)
        aim = F.mse_loss(logits.centre[known], labels.centre[known])
        return torch.stack([*parts, options.centre_weight * aim]).sum()

    return Trainer("classifier", classifier, loss, options.optimisation)
