"""What requests take beside their steps, learnt from those that have ended."""

from __future__ import annotations

from dataclasses import dataclass

# completions that are remembered
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that a request of a model spends outside of the step loop.

    Attributes:
        encode_s: from its lease until it can step.
        rest_s: from its last step until the dispatcher has the image, its decoding left out.
        num_observed: completions so far.
    """

    encode_s: float = 0.0
    rest_s: float = 0.0
    num_observed: int = 0


def observe_stages(times: StageTimes, *, encode_s: float, rest_s: float) -> StageTimes:
    """Return what is known after one more completion; later ones fade exponentially."""
    num_observed = times.num_observed + 1
    weight = 1 / min(num_observed, _WINDOW)
    return StageTimes(
        encode_s=times.encode_s + weight * (encode_s - times.encode_s),
        rest_s=times.rest_s + weight * (max(0.0, rest_s) - times.rest_s),
        num_observed=num_observed,
    )
