"""What a discriminator is to the worker that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ray_cluster.models.cascade_curves import Calibration
from ray_cluster.requests import SmallImage


class Scorer(Protocol):
    """Answers how sure it is that images are right for their prompts.

    The confidence of an image depends on that image and its prompt alone, not on what is scored
    with it.
    """

    def score(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        """Return a calibrated confidence in [0, 1] for each image.

        Args:
            prompts: one for each image.
            images: of any sizes; see :func:`ray_cluster.imaging.small_images.small_image`.
        """
        ...


class RawScorer(Protocol):
    """Scores images on a scale of its own: the higher, the better. Not calibrated."""

    def raw_scores(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        """Return a score for each image; arguments as of :meth:`Scorer.score`."""
        ...


class CalibratedScorer:
    """A raw scorer with what makes confidences of its scores."""

    def __init__(self, raw: RawScorer, calibration: Calibration) -> None:
        self.raw = raw
        self.calibration = calibration

    def score(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        """See :meth:`Scorer.score`."""
        return [self.calibration.confidence(one) for one in self.raw.raw_scores(prompts, images)]
