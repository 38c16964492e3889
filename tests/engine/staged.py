"""A loaded model whose stages can be watched, held up and made to fail for one request."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.stages.events import Broken, Decoded, Died, Previewed, RunnerEvent, Stepped
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.requests import ImageRequest
from tests.engine.harness import pool, run_alone

StageName = Literal["encode", "denoise", "decode"]
PATIENCE_S = 120.0


def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for something that other threads do."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.005)


class Gate:
    """Holds a stage when its next call has a request of that id in it."""

    def __init__(self, stage: StageName, request_id: str, call: int = 0) -> None:
        self.stage, self.request_id = stage, request_id
        self._call = call
        self._reached, self._opened = threading.Event(), threading.Event()

    def pass_through(self, stage: StageName, ids: Sequence[str]) -> None:
        if stage == self.stage and self.request_id in ids and not self._reached.is_set():
            if self._call > 0:
                self._call -= 1
                return
            self._reached.set()
            assert self._opened.wait(PATIENCE_S)

    def await_reached(self) -> None:
        assert self._reached.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()


class StagedModel:
    """Wraps the stages of a model.

    Attributes:
        calls: the stage and the request ids of every call, in order.
        before: called with them before each call; may raise.
        nan_in: by stage, the ids of requests whose result becomes NaN.
        embeds: weak references to what the encoder made, by request id.
        final: the final latents of requests, by which the decode stage knows them.
    """

    def __init__(self, inner: LoadedModel, requests: Sequence[ImageRequest] = ()) -> None:
        self.inner = inner
        self.calls: list[tuple[StageName, tuple[str, ...]]] = []
        self.before: list[Callable[[StageName, Sequence[str]], None]] = []
        self.nan_in: dict[StageName, str] = {}
        self.embeds: dict[str, weakref.ref[Tensor]] = {}
        self.final = {one.request_id: run_alone(inner, one) for one in requests}
        self._id_by_embeds: dict[int, str] = {}
        # one model under several runners, which no process has: tokenizers and what executors keep
        # between steps know only one thread
        self._one_thread = threading.Lock()
        self.device, self.dtype = inner.executor.device, inner.executor.dtype
        self.layers, self.bind = inner.executor.layers, inner.executor.bind
        self.latent_shape = inner.executor.latent_shape
        self.num_levels = inner.executor.num_levels
        self.num_conditions = inner.executor.num_conditions
        self.merged = inner.executor.merged
        self._id_by_prepared: dict[int, str] = {}
        self.max_prompt_tokens = inner.encoder.max_prompt_tokens
        self.tokenizers = inner.encoder.tokenizers
        self.loaded = replace(inner, encoder=self, executor=self, decoder=self)  # type: ignore[arg-type]

    def lent(self) -> Iterator[StagedModel]:
        """Lend it to one test, without what others did to it."""
        self.calls.clear()
        self.before.clear()
        yield self
        self.before.clear()

    def pixels(self) -> Mapping[str, Pixels]:
        """The images of all requests, as each alone gives them."""
        with torch.inference_mode():
            return {key: self.inner.decoder.decode([one])[0] for key, one in self.final.items()}

    def gate(self, stage: StageName, request_id: str, call: int = 0) -> Gate:
        gate = Gate(stage, request_id, call)
        self.before.append(gate.pass_through)
        return gate

    def steps_of(self, request_id: str) -> int:
        return sum(stage == "denoise" and request_id in ids for stage, ids in self.calls)

    def encode(self, requests: Sequence[ImageRequest], deltas: Sequence[Any] = ()) -> Any:
        ids = [one.request_id for one in requests]
        self._enter("encode", ids)
        with self._one_thread:
            conditionings = self.inner.encoder.encode(requests, deltas)
        for index, key in enumerate(ids):
            embeds = conditionings[index].prompt_embeds.clone()
            if self.nan_in.get("encode") == key:
                embeds *= float("nan")
            conditionings[index] = replace(conditionings[index], prompt_embeds=embeds)
            self.embeds[key] = weakref.ref(embeds)
            self._id_by_embeds[id(embeds)] = key
        return conditionings

    def prepare(self, conditioning: Any, deltas: Any = None) -> Any:
        with self._one_thread:
            prepared = self.inner.executor.prepare(conditioning, deltas)
        name = self._id_by_embeds.get(id(conditioning.prompt_embeds), "?")
        self._id_by_prepared[id(prepared)] = name
        return prepared

    def encode_half(self, batch: Any) -> Any:
        ids = [self._id_by_prepared[id(one)] for one in batch.prepared]
        self._enter("denoise", ids)
        with self._one_thread:
            return ids, self.inner.executor.encode_half(batch)

    def decode_half(self, encoded: Any, residuals: Any = None) -> Tensor:
        ids, half = encoded
        with self._one_thread:
            output = self.inner.executor.decode_half(half, residuals)
        if self.nan_in.get("denoise") in ids:
            images = output.split(half.batch.layout.request_tokens)
            images[ids.index(self.nan_in["denoise"])][:] = float("nan")
        return output

    def decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        ids = [self._name(one) for one in latents]
        self._enter("decode", ids)
        if self.nan_in.get("decode") in ids:
            # what the real decoder does with such latents
            latents = [
                one * float("nan") if key == self.nan_in["decode"] else one
                for key, one in zip(ids, latents, strict=True)
            ]
        return self.inner.decoder.decode(latents)

    def _name(self, latents: Tensor) -> str:
        for key, final in self.final.items():
            if final.shape == latents.shape and torch.allclose(final, latents, atol=1e-3):
                return key
        return "?"

    def _enter(self, stage: StageName, ids: Sequence[str]) -> None:
        self.calls.append((stage, tuple(ids)))
        for hook in self.before:
            hook(stage, ids)


class Events:
    """Collects what a runner tells."""

    def __init__(self) -> None:
        self.all: list[RunnerEvent] = []

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, Stepped):
            # without the states, whose memory tests watch
            event = Stepped(replace(event.report, finished=(), failed=(), previews=()))
        self.all.append(event)

    @property
    def ends(self) -> list[Decoded | Broken]:
        return [event for event in self.all if isinstance(event, Decoded | Broken)]

    def previews_of(self, request_id: str) -> list[Previewed]:
        events = [event for event in self.all if isinstance(event, Previewed)]
        return [event for event in events if event.request.request_id == request_id]

    @property
    def deaths(self) -> list[Died]:
        return [event for event in self.all if isinstance(event, Died)]

    @property
    def ended_ids(self) -> list[str]:
        return [event.request.request_id for event in self.ends]

    def end_of(self, request_id: str) -> Decoded | Broken:
        until(lambda: request_id in self.ended_ids, f"the end of {request_id}")
        (found,) = [event for event in self.ends if event.request.request_id == request_id]
        return found

    def pixels_of(self, request_id: str) -> Pixels:
        end = self.end_of(request_id)
        assert isinstance(end, Decoded), end
        return end.pixels

    def failure_of(self, request_id: str) -> Any:
        end = self.end_of(request_id)
        assert isinstance(end, Broken), end
        return end.error


class Running:
    """A started runner and its events; a context manager that stops it.

    Args:
        before_stop: gates to open whatever happens, so that no thread is left waiting.
    """

    def __init__(
        self, model: LoadedModel, *, max_batch: int = 8, clock: Any = time.monotonic
    ) -> None:
        self.events = Events()
        self.runner: EngineRunner = build_runner(
            model, pool("unused", max_batch=max_batch), clock=clock
        )

    def submit(self, *requests: ImageRequest) -> None:
        for one in requests:
            self.runner.submit(one, deadline_s=1e12)

    def __enter__(self) -> Running:
        self.runner.start(self.events)
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.stop()
