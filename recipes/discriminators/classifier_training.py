"""Trains the attribute classifier on renders, with the loop that trains the reference models."""

import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.quality.classifier import AttributeClassifier, Logits
from recipes.discriminators.classifier_examples import (
    IGNORED,
    Canvas,
    Examples,
    Labels,
    blends,
    blobs,
    degrade,
    empty_backgrounds,
    gradients,
    joined,
    noises,
    several_objects,
    single_objects,
    styled_objects,
)
from recipes.recipe import ClassifierRecipe
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed

# pictures in which no shape is to be seen
NONE_KINDS: dict[str, Callable[..., Examples]] = {
    "blob": blobs,
    "blend": blends,
    "empty": empty_backgrounds,
    "noise": noises,
    "gradient": gradients,
}


def draw_examples(rng: random.Random, recipe: ClassifierRecipe) -> Examples:
    """Draw one batch of a bucket's size: pictures of one object, and the other kinds."""
    bucket = rng.choices(recipe.buckets, [bucket.share for bucket in recipe.buckets])[0]
    counts = {kind: max(1, round(share * bucket.batch)) for kind, share in recipe.shares}
    rest = bucket.batch - sum(counts.values())
    canvas = Canvas(bucket.width, bucket.height, recipe.jitter)
    kinds: dict[str, Callable[..., Examples]] = {
        **NONE_KINDS,
        "several": several_objects,
        "styled": styled_objects,
        "blob beside objects": partial(blobs, alone=False),
    }
    parts = [single_objects(rng, rest, canvas)]
    parts += [kinds[kind](rng, count, canvas) for kind, count in counts.items()]
    drawn = joined(parts)
    return Examples(degrade(drawn.pixels, recipe, rng), drawn.labels)


def classifier_trainer(run: TrainingRun) -> Trainer:
    """The stage that trains the classifier; no generated picture ever takes part."""
    recipe, options = run.recipe, run.recipe.classifier
    torch.manual_seed(step_seed(recipe.seed, "classifier", -1))
    classifier = AttributeClassifier(options.channels).to(run.device)

    def loss(index: int) -> Tensor:
        rng = random.Random(step_seed(recipe.seed, "classifier", index))
        examples = draw_examples(rng, options)
        logits = classifier(examples.pixels.to(run.device))
        style = examples.labels.style.to(run.device)
        styled = F.cross_entropy(logits.style, style, ignore_index=IGNORED)
        return attribute_loss(logits, examples.labels, options) + styled

    return Trainer("classifier", classifier, loss, options.optimisation)


def attribute_loss(logits: Logits, labels: Labels, recipe: ClassifierRecipe) -> Tensor:
    """Cross-entropy of objects' attributes and backgrounds; the style's is not among them."""
    parts = [
        _cross_entropy(getattr(logits, name), getattr(labels, name), recipe)
        for name in ("shape", "colour", "size", "background")
    ]
    return torch.stack(parts).sum()


def _cross_entropy(scores: Tensor, labels: Tensor, recipe: ClassifierRecipe) -> Tensor:
    """Of scores [..., classes] and labels [...], with "none" weighing less."""
    weights = torch.ones(scores.shape[-1], device=scores.device)
    weights[0] = recipe.none_weight
    return F.cross_entropy(
        scores.flatten(0, -2),
        labels.flatten().to(scores.device),
        weight=weights,
        ignore_index=IGNORED,
    )
