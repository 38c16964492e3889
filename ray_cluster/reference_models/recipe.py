"""Every number of the reference model's training, in one place."""

from dataclasses import dataclass, field

from ray_cluster.reference_models.render import Jitter


@dataclass(frozen=True)
class Optimisation:
    """AdamW with warm-up, a constant rate, and a linear decay over the last `decay_steps`."""

    steps: int
    batch: int
    rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float = 0.01
    beta2: float = 0.99
    clip: float = 1.0
    # 0 keeps no average of the weights
    ema: float = 0.0


@dataclass(frozen=True)
class CaptionMix:
    """How captions are drawn: shares of one-object scenes, omitted details and added words.

    `bare_share` of the captions leave out every detail, as in "a red circle".
    """

    single_share: float
    omit_share: float
    filler_share: float
    bare_share: float = 0.0


@dataclass(frozen=True)
class SizeBucket:
    """Pictures of `width` x `height` pixels, taken in `share` of the steps, `batch` at a time."""

    width: int
    height: int
    batch: int
    share: float


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
    patch: int = 4
    channels: int = 32
    # pictures that the components are computed from
    fit_pictures: int = 2000
    least_scale: float = 0.7
    latent_noise: float = 0.05
    captions: CaptionMix = CaptionMix(single_share=0.6, omit_share=0.0, filler_share=0.0)
    buckets: tuple[SizeBucket, ...] = (
        SizeBucket(64, 64, 16, 0.7),
        SizeBucket(96, 96, 8, 0.1),
        SizeBucket(128, 128, 4, 0.1),
        SizeBucket(96, 64, 11, 0.05),
        SizeBucket(64, 96, 11, 0.05),
    )
    optimisation: Optimisation = Optimisation(
        steps=1446, batch=16, rate=2e-3, warmup_steps=50, decay_steps=500, ema=0.99
    )


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
    # the loss counts this much more in and near objects than on the background
    object_weight: float = 4.0
    object_margin: float = 1.3
    # from this step of diffusion on, only objects whose place and size are stated count more: where
    # neither caption nor picture tells the place, it would make objects appear in several places
    unstated_weight_until: int = 1000


@dataclass(frozen=True)
class DenoiserRecipe:
    """The UNet: v-prediction on the codec's latents with zero terminal signal.

    The phase `first` teaches it shapes, mostly on full captions at 64 pixels; `second` continues
    with short captions and larger pictures.
    """

    channels: tuple[int, int, int] = (32, 64, 128)
    layers: int = 1
    heads: int = 4
    first: DenoiserPhase = DenoiserPhase(
        captions=CaptionMix(single_share=0.85, omit_share=0.25, filler_share=0.05),
        buckets=(
            SizeBucket(64, 64, 32, 0.65),
            SizeBucket(96, 64, 21, 0.07),
            SizeBucket(64, 96, 21, 0.07),
            SizeBucket(128, 64, 16, 0.055),
            SizeBucket(64, 128, 16, 0.055),
            SizeBucket(96, 96, 14, 0.06),
            SizeBucket(128, 128, 8, 0.04),
        ),
        optimisation=Optimisation(
            steps=10901, batch=32, rate=1.2e-3, warmup_steps=200, decay_steps=2500, ema=0.999
        ),
    )
    second: DenoiserPhase = DenoiserPhase(
        captions=CaptionMix(single_share=0.85, omit_share=0.35, filler_share=0.05, bare_share=0.25),
        buckets=(
            SizeBucket(64, 64, 32, 0.35),
            SizeBucket(96, 64, 21, 0.04),
            SizeBucket(64, 96, 21, 0.04),
            SizeBucket(128, 64, 16, 0.04),
            SizeBucket(64, 128, 16, 0.04),
            SizeBucket(96, 96, 14, 0.17),
            SizeBucket(128, 128, 8, 0.32),
        ),
        optimisation=Optimisation(
            steps=5811, batch=32, rate=8e-4, warmup_steps=100, decay_steps=2700, ema=0.999
        ),
        unstated_weight_until=500,
    )


@dataclass(frozen=True)
class ClassifierRecipe:
    """The attribute classifier, trained on renders only."""

    channels: int = 64
    # more play than the generator's data has, so that a slightly displaced object still counts
    jitter: Jitter = field(default_factory=lambda: Jitter(offset=0.04, scale=0.08))
    # the share of each kind of picture in a batch; the rest shows one object
    none_shares: tuple[tuple[str, float], ...] = (
        ("blob", 0.12),
        ("blend", 0.06),
        ("several", 0.05),
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
    centre_weight: float = 4.0
    optimisation: Optimisation = Optimisation(
        steps=2500, batch=64, rate=2e-3, warmup_steps=100, decay_steps=1250, ema=0.99
    )


@dataclass(frozen=True)
class Recipe:
    """The whole family of stages, with one seed."""

    seed: int = 20
    jitter: Jitter = field(default_factory=Jitter)
    text: TextRecipe = field(default_factory=TextRecipe)
    codec: CodecRecipe = field(default_factory=CodecRecipe)
    denoiser: DenoiserRecipe = field(default_factory=DenoiserRecipe)
    classifier: ClassifierRecipe = field(default_factory=ClassifierRecipe)
