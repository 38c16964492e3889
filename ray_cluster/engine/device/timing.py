"""Times single operations of a loaded model, and every step of a batch of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.controlnets.source import ControlNetResiduals
from ray_cluster.engine.models.loading import LoadedModel, encode_images, start_states
from ray_cluster.engine.step.mixed_step import StepSources
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.errors import Stage
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, ImageRequest, SamplerName

T = TypeVar("T")
SizePx = tuple[int, int]


class StageCall(Protocol):
    """Runs something as a stage does, and returns what it returns."""

    def __call__(self, stage: Stage, work: Callable[[], T], /) -> T: ...


@torch.inference_mode()
def call_here(_stage: Stage, work: Callable[[], T]) -> T:
    """Run something of a stage in the calling thread."""
    return work()


class TimedControlNet(NamedTuple):
    """A ControlNet, by its name, and who computes it."""

    name: str
    controls: ControlNetBackend


class OperationTimer:
    """Times operations of one model again and again; the first of each kind is not counted.

    Args:
        model: what is timed.
        clock: monotonic seconds.
        repeats: how often each operation is counted.
        call: where the work of a stage is done; in the calling thread unless given.
    """

    def __init__(
        self,
        model: LoadedModel,
        clock: Callable[[], float],
        repeats: int,
        call: StageCall = call_here,
    ) -> None:
        self._model = model
        self._clock = clock
        self._repeats = repeats
        self._call = call

    def steps_s(
        self,
        sizes: Sequence[SizePx],
        *,
        guidance_scale: float = 1.0,
        samplers: Sequence[SamplerName] = (),
        deltas: Sequence[LayerDeltas] = (),
        control: TimedControlNet | None = None,
    ) -> list[float]:
        """Return the seconds of steps of a batch of images of these sizes, one of each entry.

        Args:
            samplers: that the images take in turn; the model's first one unless given.
            deltas: that they have in turn; none unless given.
            control: a ControlNet that all of them have.
        """
        sources = StepSources()
        if control is not None:
            sources = StepSources(residuals=ControlNetResiduals(control.controls, self._clock))
        engine = StepEngine(
            self._model.executor,
            lambda rows, _now_s: [row.request.request_id for row in rows],
            self._model.tables,
            self._clock,
            sources=sources,
        )
        requests = self._requests(sizes, guidance_scale, samplers)
        states = self._call(
            "encode", lambda: start_states(self._model, requests, now_s=self._clock())
        )
        if control is not None:
            states = [_with_controlnet(state, control.name) for state in states]
        for index, state in enumerate(states):
            engine.add(state, deltas[index % len(deltas)] if deltas else None)

        def durations_s() -> list[float]:
            # a step has looked at its result when it is done, so it has waited for the device
            found_s = [engine.step().duration_s for _ in range(1 + self._repeats)]
            for request in requests:
                engine.abort(request.request_id)
            return found_s[1:]

        return self._call("denoise", durations_s)

    def encodes_s(self, batch: int, *, guidance_scale: float = 1.0) -> list[float]:
        """Return the seconds of encoding the prompts of so many images together."""
        profile = self._model.profile
        size = (profile.default_width_px, profile.default_height_px)
        requests = self._requests([size] * batch, guidance_scale, ())

        def encode() -> None:
            self._model.encoder.encode(requests)
            if self._model.executor.device.type == "cuda":
                torch.cuda.synchronize(self._model.executor.device)

        return self._times_s("encode", encode)

    def decodes_s(self, size: SizePx, batch: int) -> list[float]:
        """Return the seconds of decoding so many images of a size together."""
        executor = self._model.executor
        latents = [torch.zeros(executor.latent_shape(*size), device=executor.device)] * batch
        # its pixels are on the host: it has waited for the device
        return self._times_s("decode", lambda: self._model.decoder.decode(latents))

    def image_encodes_s(self, size: SizePx, batch: int) -> list[float]:
        """Return the seconds of encoding so many images of a size together, for edits."""
        blank = np.zeros((size[1], size[0], 3), np.uint8)
        pixels = [EditPixels(blank, None, blank, None)] * batch

        def encode() -> None:
            # it has waited for the device
            encode_images(self._model, pixels)

        return self._times_s("image", encode)

    def _times_s(self, stage: Stage, operation: Callable[[], object]) -> list[float]:
        def durations_s() -> list[float]:
            found_s = []
            for _ in range(1 + self._repeats):
                started_s = self._clock()
                operation()
                found_s.append(self._clock() - started_s)
            return found_s[1:]

        return self._call(stage, durations_s)

    def _requests(
        self, sizes: Sequence[SizePx], guidance_scale: float, samplers: Sequence[SamplerName]
    ) -> list[ImageRequest]:
        samplers = samplers or self._model.tables.names[:1]
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
                sampler=samplers[index % len(samplers)],
                seed=index,
            )
            for index, (width, height) in enumerate(sizes)
        ]


def _with_controlnet(state: RequestState, name: str) -> RequestState:
    """Return a state that follows a blank map."""
    request = state.request
    blank = torch.zeros((request.height_px, request.width_px, 3), dtype=torch.uint8)
    add_ons = AddOns(controls=(ControlNetUse(name, BlobRef("", 0)),))
    return replace(state, request=replace(request, add_ons=add_ons), maps=(blank,))


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
