"""The numbers of the discriminators' training."""

from dataclasses import dataclass

from ray_cluster.quality.suite import CALIBRATION_SEED
from recipes.recipe_parts import CaptionMix, Optimisation, SizeBucket


@dataclass(frozen=True)
class PictureSets:
    """The pictures that discriminators are trained on, made by the first who needs them.

    Attributes:
        sizes: width and height of the pictures, and how many sets there are of it.
        light: pictures of the light model in a set.
        heavy: of the large one, in `heavy_steps` steps.
        renders: that have gone through the autoencoder, so that it does not give others away.
    """

    captions: CaptionMix = CaptionMix(
        single_share=0.45, omit_share=0.25, filler_share=0.05, bare_share=0.08
    )
    sizes: tuple[tuple[int, int, int], ...] = (
        (64, 64, 32),
        (128, 128, 2),
        (96, 64, 1),
        (64, 96, 1),
        (128, 64, 1),
        (64, 128, 1),
    )
    light: int = 128
    heavy: int = 16
    heavy_steps: int = 10
    renders: int = 96


@dataclass(frozen=True)
class DiscriminatorRecipe:
    """A discriminator, trained on what the attribute classifier says of generated pictures.

    Attributes:
        width: of the comparison of picture and prompt.
        changed_share: of the pictures that are shown with a prompt of which a detail was changed.
        read_share: of those shown with a prompt that says what is seen.
        other_share: of those shown with another picture's prompt; the rest have their own.
        colour_shift: most that a picture's colours are shifted by.
        part_weight: of the loss of single positions; `reading_weight`: of what is read.
        buckets: of pictures as they are read, whose shorter side is 64 pixels.
        calibration_prompts: easy ones, and as many hard ones, of a seed that is not the suite's.
        calibration_pairs: of each of them, those for which the heavy model makes an image as well.
    """

    channels: int = 32
    width: int = 64
    heads: int = 4
    changed_share: float = 0.25
    read_share: float = 0.15
    other_share: float = 0.05
    colour_shift: float = 0.03
    part_weight: float = 2.0
    reading_weight: float = 0.2
    buckets: tuple[SizeBucket, ...] = (
        SizeBucket(64, 64, 64, 0.8),
        SizeBucket(96, 64, 48, 0.05),
        SizeBucket(64, 96, 48, 0.05),
        SizeBucket(128, 64, 32, 0.05),
        SizeBucket(64, 128, 32, 0.05),
    )
    optimisation: Optimisation = Optimisation(
        steps=4000, batch=64, rate=2e-3, warmup_steps=100, decay_steps=2000, ema=0.995
    )
    calibration_prompts: int = 750
    calibration_pairs: int = 250
    calibration_seed: int = CALIBRATION_SEED


REAL_OR_GENERATED = DiscriminatorRecipe(
    optimisation=Optimisation(
        steps=2450, batch=64, rate=1e-3, warmup_steps=100, decay_steps=1000, ema=0.99
    )
)
