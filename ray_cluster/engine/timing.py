"""Times single operations of a loaded model, and every step of a batch of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ray_cluster.engine.loading import LoadedModel, start_states
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]


class OperationTimer:
    """Times operations of one model again and again; the first of each kind is not counted.

    Args:
        model: what is timed; only the calling thread works.
        clock: monotonic seconds.
        repeats: how often each operation is counted.
    """

    def __init__(self, model: LoadedModel, clock: Callable[[], float], repeats: int) -> None:
        self._model = model
        self._clock = clock
        self._repeats = repeats

    def steps_s(self, sizes: Sequence[SizePx], *, guidance_scale: float = 1.0) -> list[float]:
        """Return the seconds of steps of a batch of images of these sizes, one of each entry."""
        engine = StepEngine(
            self._model.executor,
            lambda rows, _now_s: [row.request.request_id for row in rows],
            self._model.tables,
            self._clock,
        )
        with torch.inference_mode():
            requests = self._requests(sizes, guidance_scale)
            for state in start_states(self._model, requests, now_s=self._clock()):
                engine.add(state)
            # a step has looked at its result when it is done, so it has waited for the device
            return [engine.step().duration_s for _ in range(1 + self._repeats)][1:]

    def encodes_s(self, batch: int, *, guidance_scale: float = 1.0) -> list[float]:
        """Return the seconds of encoding the prompts of so many images together."""
        profile = self._model.profile
        size = (profile.default_width_px, profile.default_height_px)
        requests = self._requests([size] * batch, guidance_scale)

        def encode() -> None:
            self._model.encoder.encode(requests)
            if self._model.executor.device.type == "cuda":
                torch.cuda.synchronize(self._model.executor.device)

        return self._times_s(encode)

    def decodes_s(self, size: SizePx, batch: int) -> list[float]:
        """Return the seconds of decoding so many images of a size together."""
        executor = self._model.executor
        latents = [torch.zeros(executor.latent_shape(*size), device=executor.device)] * batch
        # its pixels are on the host: it has waited for the device
        return self._times_s(lambda: self._model.decoder.decode(latents))

    def _times_s(self, operation: Callable[[], object]) -> list[float]:
        durations_s = []
        with torch.inference_mode():
            for _ in range(1 + self._repeats):
                started_s = self._clock()
                operation()
                durations_s.append(self._clock() - started_s)
        return durations_s[1:]

    def _requests(self, sizes: Sequence[SizePx], guidance_scale: float) -> list[ImageRequest]:
        return [
            ImageRequest(
                request_id=f"timed-{index}",
                model=self._model.profile.model,
                prompt="a circle",
                width_px=width,
                height_px=height,
                # one is left over: the last step of an image does less
                num_steps=2 + self._repeats,
                guidance_scale=guidance_scale,
                sampler=self._model.tables.names[0],
                seed=index,
            )
            for index, (width, height) in enumerate(sizes)
        ]


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
