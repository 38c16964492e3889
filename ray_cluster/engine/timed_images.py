"""Makes images of one batch in the calling thread, and times every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.starting import start_states
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.requests import ImageRequest


@dataclass(frozen=True, slots=True)
class TimedImages:
    """What came of a batch.

    Attributes:
        images: ``[B, H, W, 3]`` uint8, in the order of the requests.
        step_s: seconds of every step.
        is_reused: per step, whether its rows reused activations.
    """

    images: npt.NDArray[np.uint8]
    step_s: tuple[float, ...]
    is_reused: tuple[bool, ...]


@torch.inference_mode()
def make_timed(
    model: LoadedModel, requests: Sequence[ImageRequest], clock: Callable[[], float]
) -> TimedImages:
    """Make images of one size, all with the same number of steps.

    Raises:
        RequestFailed: the model failed on one of them.
    """
    engine = StepEngine(
        model.executor,
        lambda rows, _now_s: [row.request.request_id for row in rows],
        model.tables,
        clock,
    )
    states = start_states(model, requests, now_s=clock())
    for state in states:
        engine.add(state)
    reports = []
    while len(engine):
        reports.append(engine.step())
        if reports[-1].failed:
            raise reports[-1].failed[0].error
    images = [image for state in states for image in model.decoder.decode([state.latents])]
    return TimedImages(
        np.stack(images),
        tuple(report.duration_s for report in reports),
        tuple(report.num_reused > 0 for report in reports),
    )
