"""Every number of the training of the built-in models."""

from dataclasses import dataclass, field, replace
from typing import Literal

from ray_cluster.quality.render import HINT_JITTER, Jitter
from ray_cluster.quality.scenes import Style
from recipes.discriminators.recipe import (
    REAL_OR_GENERATED,
    DiscriminatorRecipe,
    PictureSets,
)
from recipes.recipe_parts import CaptionMix, Optimisation, SizeBucket, size_buckets


@dataclass(frozen=True)
class DenoiserPhase:
    """One phase of the denoiser's training: its data, its loss and its optimisation."""

    captions: CaptionMix
    buckets: tuple[SizeBucket, ...]
    optimisation: Optimisation
    caption_drop: float = 0.1
    # this share of the steps of diffusion is drawn from the noisiest part, where captions decide
    noisy_share: float = 0.5
    noisy_from: int = 600
    # of what is left, this share is drawn from `steps_used`, the steps that a sampler will take
    used_share: float = 0.0
    steps_used: tuple[int, ...] = ()
    # the loss counts this much more in and near objects than on the background
    object_weight: float = 4.0
    object_margin: float = 1.3
    # from this step of diffusion on, only objects whose place and size are stated count more: where
    # neither caption nor picture shows the place, it would make objects appear in several places
    unstated_weight_until: int = 1000


@dataclass(frozen=True)
class UNetSize:
    """Channels of the three levels, residual blocks per level, heads of attention."""

    channels: tuple[int, int, int]
    layers: int = 1
    heads: int = 4


HintKind = Literal["edges", "layout"]


@dataclass(frozen=True)
class TextRecipe:
    """The text encoder, trained alone on reading its captions, then frozen."""

    width: int = 64
    layers: int = 3
    heads: int = 4
    captions: CaptionMix = CaptionMix(single_share=0.5, omit_share=0.4, filler_share=0.15)
    optimisation: Optimisation = Optimisation(
        steps=1500, batch=64, rate=2e-3, warmup_steps=50, decay_steps=750
    )


@dataclass(frozen=True)
class CodecRecipe:
    """The autoencoder; its latents are the principal components of 4 x 4 patches."""

    latent_channels: int = 4
    # in the run's folder, for the components
    basis_file: str = "basis.safetensors"
    patch: int = 4
    channels: int = 32
    # pictures that the components are computed from
    fit_pictures: int = 2000
    least_scale: float = 0.7
    latent_noise: float = 0.05
    # steps that show pictures in a style of the LoRAs', which decoding must not undo
    styled_share: float = 0.35
    captions: CaptionMix = CaptionMix(single_share=0.6, omit_share=0.0, filler_share=0.0)
    buckets: tuple[SizeBucket, ...] = (
        SizeBucket(64, 64, 16, 0.7),
        SizeBucket(96, 96, 8, 0.1),
        SizeBucket(128, 128, 4, 0.1),
        SizeBucket(96, 64, 11, 0.05),
        SizeBucket(64, 96, 11, 0.05),
    )
    optimisation: Optimisation = Optimisation(
        steps=3000, batch=16, rate=2e-3, warmup_steps=50, decay_steps=1000, ema=0.99
    )


# of the models that build on the first one
_MIXED_SIZES = size_buckets(s64=0.6, s96=0.08, s128=0.12, o96=0.05, o128=0.05)


@dataclass(frozen=True)
class UNetRecipe:
    """A UNet in two phases: v-prediction on the codec's latents with zero terminal signal."""

    size: UNetSize
    first: DenoiserPhase
    second: DenoiserPhase


# first shapes, mostly on full captions at 64 pixels, then short captions and larger pictures
_DENOISER = UNetRecipe(
    size=UNetSize(channels=(32, 64, 128)),
    first=DenoiserPhase(
        captions=CaptionMix(single_share=0.85, omit_share=0.25, filler_share=0.05),
        buckets=size_buckets(s64=0.65, s96=0.06, s128=0.04, o96=0.07, o128=0.055),
        optimisation=Optimisation(
            steps=10901, batch=32, rate=1.2e-3, warmup_steps=200, decay_steps=2500, ema=0.999
        ),
    ),
    second=DenoiserPhase(
        captions=CaptionMix(single_share=0.85, omit_share=0.35, filler_share=0.05, bare_share=0.25),
        buckets=size_buckets(s64=0.35, s96=0.17, s128=0.32, o96=0.04, o128=0.04),
        optimisation=Optimisation(
            steps=5811, batch=32, rate=8e-4, warmup_steps=100, decay_steps=2700, ema=0.999
        ),
        unstated_weight_until=500,
    ),
)
# The small UNet, for one or two steps without guidance: mostly trained at the two steps that such
# a sampler takes. With as many scenes of several objects as the large one sees, it would draw these
# as well as that one: so its second phase, which has them, is short.
_LIGHT_FIRST = DenoiserPhase(
    captions=CaptionMix(single_share=0.93, omit_share=0.3, filler_share=0.05, bare_share=0.15),
    buckets=_MIXED_SIZES,
    optimisation=Optimisation(
        steps=13000, batch=32, rate=1.5e-3, warmup_steps=200, decay_steps=4000, ema=0.999
    ),
    noisy_share=0.0,
    used_share=0.85,
    steps_used=(999, 499),
    unstated_weight_until=500,
)
_LIGHT = UNetRecipe(
    size=UNetSize(channels=(16, 32, 48)),
    first=_LIGHT_FIRST,
    second=replace(
        _LIGHT_FIRST,
        captions=CaptionMix(single_share=0.77, omit_share=0.3, filler_share=0.05, bare_share=0.2),
        buckets=size_buckets(s64=0.34, s96=0.1, s128=0.4, o96=0.04, o128=0.04),
        optimisation=Optimisation(
            steps=4500, batch=32, rate=1e-3, warmup_steps=50, decay_steps=2500, ema=0.998
        ),
    ),
)


@dataclass(frozen=True)
class ControlNetRecipe:
    """A ControlNet, on pictures whose objects vary more in place and size than captions say."""

    kind: HintKind
    # of the network that brings the hint to the latents' size
    hint_channels: tuple[int, int, int] = (16, 32, 64)
    jitter: Jitter = HINT_JITTER
    phase: DenoiserPhase = DenoiserPhase(
        captions=CaptionMix(single_share=0.5, omit_share=0.5, filler_share=0.05, bare_share=0.3),
        buckets=_MIXED_SIZES,
        optimisation=Optimisation(
            steps=3000, batch=32, rate=1e-3, warmup_steps=100, decay_steps=1000, ema=0.998
        ),
    )


# ends of the names of the UNet's modules
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
_CONVOLUTIONS = ("conv1", "conv2", "conv_out")


def _lora_phase(steps: int) -> DenoiserPhase:
    return DenoiserPhase(
        captions=CaptionMix(single_share=0.5, omit_share=0.25, filler_share=0.05, bare_share=0.1),
        buckets=_MIXED_SIZES,
        optimisation=Optimisation(
            steps=steps, batch=32, rate=2e-3, warmup_steps=50, decay_steps=800, ema=0.99
        ),
        unstated_weight_until=500,
    )


@dataclass(frozen=True)
class LoraRecipe:
    """One style's LoRA on the large UNet; `targets` are the ends of its modules' names."""

    style: Style
    rank: int
    targets: tuple[str, ...] = _ATTENTION
    phase: DenoiserPhase = field(default_factory=lambda: _lora_phase(steps=1500))


@dataclass(frozen=True)
class TransformerRecipe:
    """The diffusion transformer with a codec of its own, trained by flow matching.

    The phase `first` teaches it shapes, `second` continues with larger pictures, of which the first
    shows too few for the largest to be drawn as well as the smallest.
    """

    layers: int = 6
    heads: int = 4
    head_width: int = 32
    patch: int = 2
    # tokens a side of the largest picture: 256 pixels
    largest_grid: int = 32
    # blocks before the auxiliary head, and the weight of its loss
    head_layer: int = 3
    head_weight: float = 0.2
    # of the normal distribution whose logistic is the noise level
    level_spread: float = 1.0
    codec: CodecRecipe = CodecRecipe(
        latent_channels=16, basis_file="basis16.safetensors", least_scale=0.3
    )
    first: DenoiserPhase = DenoiserPhase(
        captions=CaptionMix(single_share=0.5, omit_share=0.25, filler_share=0.05, bare_share=0.05),
        buckets=_MIXED_SIZES,
        optimisation=Optimisation(
            steps=15000, batch=32, rate=1e-3, warmup_steps=300, decay_steps=7000, ema=0.9995
        ),
        noisy_share=0.3,
    )
    second: DenoiserPhase = DenoiserPhase(
        captions=CaptionMix(single_share=0.6, omit_share=0.25, filler_share=0.05, bare_share=0.15),
        buckets=size_buckets(s64=0.35, s96=0.14, s128=0.35, o96=0.04, o128=0.04),
        optimisation=Optimisation(
            steps=5000, batch=32, rate=6e-4, warmup_steps=100, decay_steps=3500, ema=0.999
        ),
        noisy_share=0.3,
        unstated_weight_until=600,
    )


@dataclass(frozen=True)
class ClassifierRecipe:
    """The attribute classifier, trained on renders only.

    The rest of a batch, beside `shares`, shows one object.
    """

    channels: int = 64
    # more variation than in the generator's data, so that a slightly displaced object still counts
    jitter: Jitter = field(default_factory=lambda: Jitter(offset=0.06, scale=0.08))
    # of each kind of picture in a batch
    shares: tuple[tuple[str, float], ...] = (
        ("several", 0.25),
        ("styled", 0.2),
        ("blob", 0.1),
        ("blob beside objects", 0.08),
        ("blend", 0.1),
        ("empty", 0.04),
        ("noise", 0.04),
        ("gradient", 0.03),
    )
    blur: float = 1.0
    noise: float = 0.08
    colour_shift: float = 0.06
    buckets: tuple[SizeBucket, ...] = (
        SizeBucket(64, 64, 64, 0.6),
        SizeBucket(96, 96, 64, 0.08),
        SizeBucket(128, 128, 64, 0.08),
        SizeBucket(96, 64, 48, 0.06),
        SizeBucket(64, 96, 48, 0.06),
        SizeBucket(128, 64, 32, 0.06),
        SizeBucket(64, 128, 32, 0.06),
    )
    # most positions are empty, so these count less
    none_weight: float = 0.4
    optimisation: Optimisation = Optimisation(
        steps=6000, batch=64, rate=2e-3, warmup_steps=100, decay_steps=3000, ema=0.995
    )


@dataclass(frozen=True)
class Recipe:
    """The whole family of stages, with one seed."""

    seed: int = 20
    jitter: Jitter = field(default_factory=Jitter)
    text: TextRecipe = field(default_factory=TextRecipe)
    codec: CodecRecipe = field(default_factory=CodecRecipe)
    denoiser: UNetRecipe = _DENOISER
    light: UNetRecipe = _LIGHT
    edges: ControlNetRecipe = field(default_factory=lambda: ControlNetRecipe("edges"))
    layout: ControlNetRecipe = field(default_factory=lambda: ControlNetRecipe("layout"))
    # lines and patterns are a matter of neighbouring pixels, which attention does not reach: it is
    # at the UNet's two coarser levels only
    outline: LoraRecipe = field(
        default_factory=lambda: LoraRecipe("outline", 8, (*_ATTENTION, *_CONVOLUTIONS))
    )
    pastel: LoraRecipe = field(
        default_factory=lambda: LoraRecipe(
            "pastel",
            4,
            (*_ATTENTION, *_FEED_FORWARD, *_CONVOLUTIONS),
            phase=_lora_phase(steps=2500),
        )
    )
    texture: LoraRecipe = field(
        default_factory=lambda: LoraRecipe(
            "texture", 16, (*_ATTENTION, *_CONVOLUTIONS), phase=_lora_phase(steps=3000)
        )
    )
    transformer: TransformerRecipe = field(default_factory=TransformerRecipe)
    classifier: ClassifierRecipe = field(default_factory=ClassifierRecipe)
    pictures: PictureSets = field(default_factory=PictureSets)
    discriminator: DiscriminatorRecipe = field(default_factory=DiscriminatorRecipe)
    real_or_generated: DiscriminatorRecipe = REAL_OR_GENERATED
