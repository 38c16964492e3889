"""What a discriminator is to the worker that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
