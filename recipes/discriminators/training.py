"""Trains discriminators on generated pictures, by what the attribute classifier says of them."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.models.discriminators import (
    PictureDiscriminator,
    PromptDiscriminator,
    joint_score,
)
from ray_cluster.models.picture_reader import PictureReader
from ray_cluster.quality.classifier import AttributeClassifier
from recipes.discriminators.classifier_examples import label_readings
from recipes.discriminators.classifier_training import attribute_loss
from recipes.discriminators.pictures import Example, make_examples
from recipes.discriminators.prompts import part_targets, show
from recipes.discriminators.recipe import DiscriminatorRecipe
from recipes.networks.text_encoder import (
    SceneReader,
    reading_loss,
    trained_text_encoder,
)
from recipes.networks.tokenizer import build_tokenizer, tokenise
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed


def discriminator_trainer(run: TrainingRun) -> Trainer:
    """The stage that trains the discriminator of prompts and pictures.

    Heads that read picture and prompt are trained with it, and left out of what is exported.
    """
    options, name = run.recipe.discriminator, "discriminator"
    torch.manual_seed(step_seed(run.recipe.seed, name, -1))
    picture = AttributeClassifier(options.channels)
    # no loss is on the style
    picture.style.requires_grad_(False)
    prompt = SceneReader(trained_text_encoder(run), options.heads)
    model = PromptDiscriminator(picture, prompt, options.width).to(run.device)
    tokenizer, draw = build_tokenizer(), _drawer(run, options, name)

    def loss(index: int) -> Tensor:
        examples, rng = draw(index)
        shown = show(examples, rng, options)
        ids = tokenise(tokenizer, [one.caption for one in shown]).to(run.device)
        with torch.autocast(run.device.type, torch.bfloat16):
            found = model.parts(_stacked(examples, rng, run, options), ids)
        parts, places, whole, asked = (one.float() for one in found)
        wanted = torch.tensor([float(one.is_right) for one in shown], device=run.device)
        right, counts = (one.to(run.device) for one in part_targets(shown))
        by_part = F.binary_cross_entropy_with_logits(parts, right, weight=counts, reduction="sum")
        labels = label_readings([one.reading for one in examples])
        seen = attribute_loss(picture.logits(places, whole), labels, run.recipe.classifier)
        stated = reading_loss(prompt.stated(asked), [one.stated for one in shown])
        return (
            F.binary_cross_entropy_with_logits(joint_score(parts), wanted)
            + options.part_weight * by_part / counts.sum().clamp_min(1)
            + options.reading_weight * (seen + stated)
        )

    return Trainer(name, model, loss, options.optimisation)


def real_or_generated_trainer(run: TrainingRun) -> Trainer:
    """The stage that trains the discriminator of pictures alone: renders from the light model's."""
    options, name = run.recipe.real_or_generated, "real-or-generated"
    torch.manual_seed(step_seed(run.recipe.seed, name, -1))
    model = PictureDiscriminator(PictureReader(options.channels)).to(run.device)
    draw = _drawer(run, options, name, lambda one: one.source != "heavy")

    def loss(index: int) -> Tensor:
        examples, rng = draw(index)
        wanted = torch.tensor(
            [float(one.source == "render") for one in examples], device=run.device
        )
        with torch.autocast(run.device.type, torch.bfloat16):
            scores = model(_stacked(examples, rng, run, options))
        return F.binary_cross_entropy_with_logits(scores.float(), wanted)

    return Trainer(name, model, loss, options.optimisation)


def _drawer(
    run: TrainingRun,
    options: DiscriminatorRecipe,
    stage: str,
    is_wanted: Callable[[Example], bool] = lambda _: True,
) -> Callable[[int], tuple[list[Example], random.Random]]:
    """Return what draws the examples of a step; they are made when the first are drawn."""

    @cache
    def examples() -> dict[tuple[int, int], list[Example]]:
        made = make_examples(run).items()
        return {shape: [one for one in found if is_wanted(one)] for shape, found in made}

    def draw(index: int) -> tuple[list[Example], random.Random]:
        rng = random.Random(step_seed(run.recipe.seed, stage, index))
        weights = [bucket.share for bucket in options.buckets]
        bucket = rng.choices(options.buckets, weights)[0]
        return rng.choices(examples()[bucket.height, bucket.width], k=bucket.batch), rng

    return draw


def _stacked(
    examples: Sequence[Example], rng: random.Random, run: TrainingRun, options: DiscriminatorRecipe
) -> Tensor:
    """Return pictures [B, 3, H, W] in 0..1, their colours shifted a little."""
    pixels = torch.stack([one.picture for one in examples])
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    shift = torch.rand(len(pixels), 3, 1, 1, generator=generator) * 2 - 1
    return (pixels + shift * options.colour_shift).clamp(0, 1).to(run.device)
