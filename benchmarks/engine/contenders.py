"""Three ways to serve the same requests with the same weights in one thread.

Each keeps at most ``in_flight`` requests and takes the next one as soon as one is done (a closed
loop), from prompts to uint8 pixels. The engine's three stages run one after the other here, in the
calling thread, though an ``EngineRunner`` gives each a thread of its own: that would compare three
threads with one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.engine.subject import Subject
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.image_decoder import Pixels
from ray_cluster.engine.state import RequestState
from ray_cluster.requests import ImageRequest


@dataclass(slots=True)
class Served:
    """What a contender made.

    Attributes:
        images: by request id.
        latency_s: CPU seconds from a request's admission to its image, by request id.
        model_batches: requests in each model batch (each pipeline call, each engine step).
    """

    images: dict[str, Pixels] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    model_batches: list[int] = field(default_factory=list)


class Contender(Protocol):
    """Serves requests."""

    def serve(self, requests: Sequence[ImageRequest], in_flight: int) -> Served:
        """Make all the images, with at most ``in_flight`` requests at a time."""


class PipelineContender:
    """The diffusers pipeline in static batches of what is in flight; one by one if that is 1.

    One call has one number of steps, so only requests with as many steps as the oldest one can go
    with it; the others wait for its end.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def serve(self, requests: Sequence[ImageRequest], in_flight: int) -> Served:
        """See :class:`Contender`."""
        served, waiting = Served(), deque(requests)
        pending: list[ImageRequest] = []
        admitted_s: dict[str, float] = {}
        while waiting or pending:
            while waiting and len(pending) < in_flight:
                pending.append(waiting.popleft())
                admitted_s[pending[-1].request_id] = time.thread_time()
            batch = [one for one in pending if one.num_steps == pending[0].num_steps]
            pending = [one for one in pending if one not in batch]
            served.model_batches.append(len(batch))
            images = self._call(batch)
            done_s = time.thread_time()
            for request, image in zip(batch, images, strict=True):
                served.images[request.request_id] = np.asarray(image)
                served.latency_s[request.request_id] = done_s - admitted_s[request.request_id]
        return served

    def _call(self, batch: Sequence[ImageRequest]) -> list[Any]:
        first = batch[0]
        images: list[Any] = self._pipeline(
            prompt=[request.prompt for request in batch],
            negative_prompt=[request.negative_prompt for request in batch],
            width=first.width_px,
            height=first.height_px,
            num_inference_steps=first.num_steps,
            guidance_scale=first.guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
        ).images
        return images


class EngineContender:
    """The encode stage, the production step engine and the decode stage, in one thread."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    @torch.inference_mode()
    def serve(self, requests: Sequence[ImageRequest], in_flight: int) -> Served:
        """See :class:`Contender`."""
        served, waiting = Served(), deque(requests)
        admitted_s: dict[str, float] = {}
        engine = build_engine(self._subject.model, max_batch=in_flight, clock=time.monotonic)
        while waiting or len(engine):
            room = min(len(waiting), in_flight - len(engine))
            admitted = [waiting.popleft() for _ in range(room)]
            admitted_s |= {request.request_id: time.thread_time() for request in admitted}
            if admitted:
                for state in self._subject.start(admitted):
                    engine.add(state)
            report = engine.step()
            if report.failed:
                raise RuntimeError(f"a request failed: {report.failed[0].error}")
            served.model_batches.append(len(report.stepped))
            self._decode(report.finished, served, admitted_s)
        return served

    def _decode(
        self, finished: Sequence[RequestState], served: Served, admitted_s: dict[str, float]
    ) -> None:
        for size in {state.request.size_px for state in finished}:
            alike = [state for state in finished if state.request.size_px == size]
            images = self._subject.model.decoder.decode([state.latents for state in alike])
            done_s = time.thread_time()
            for state, image in zip(alike, images, strict=True):
                request_id = state.request.request_id
                served.images[request_id] = image
                served.latency_s[request_id] = done_s - admitted_s[request_id]
