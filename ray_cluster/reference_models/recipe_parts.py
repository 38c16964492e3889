"""What recipes are made of: optimisation, data and phases."""

from dataclasses import dataclass


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
    # neither caption nor picture tells the place, it would make objects appear in several places
    unstated_weight_until: int = 1000


@dataclass(frozen=True)
class UNetSize:
    """Channels of the three levels, residual blocks per level, heads of attention."""

    channels: tuple[int, int, int]
    layers: int = 1
    heads: int = 4
