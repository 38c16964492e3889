"""What the recipes of all stages are made of."""

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
    # 0: no average of the weights
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


def size_buckets(
    *, s64: float, s96: float, s128: float, o96: float, o128: float
) -> tuple[SizeBucket, ...]:
    """Buckets of about as many pixels each, by their shares.

    `s64`, `s96` and `s128` are squares of so many pixels; `o96` and `o128` the shares of either way
    of placing an oblong of so many by 64 pixels.
    """
    return (
        SizeBucket(64, 64, 32, s64),
        SizeBucket(96, 64, 21, o96),
        SizeBucket(64, 96, 21, o96),
        SizeBucket(128, 64, 16, o128),
        SizeBucket(64, 128, 16, o128),
        SizeBucket(96, 96, 14, s96),
        SizeBucket(128, 128, 8, s128),
    )
