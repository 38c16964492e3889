"""Requests and executors that fail on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.harness import (
    PIXEL_TOLERANCE,
    pixel_difference,
    request,
)
from tests.engine.staged import Running, StageName

Record = Callable[[str, object], None]


BAD = "bad"
STAGES: tuple[StageName, ...] = ("encode", "denoise", "decode")
ERRORS = (
    RuntimeError("no kernel for this"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    MemoryError(),
    ValueError("bad shape"),
    KeyError("attn2"),
    AssertionError(),
    ZeroDivisionError("division by zero"),
    OSError(5, "input/output error"),
    NotImplementedError("no such thing"),
)


def requests_with_a_bad_one() -> list[ImageRequest]:
    good = [request(f"r{i}", sampler=name, seed=i) for i, name in enumerate(SAMPLER_NAMES)]
    bad = request(BAD, seed=77, prompt="a large blue square", sampler="euler_ancestral")
    return [*good[:2], bad, *good[2:]]


def raises_for(stage: StageName, request_id: str, error: Exception) -> Callable[..., None]:
    def hook(at: StageName, ids: Sequence[str]) -> None:
        if at == stage and request_id in ids:
            raise error

    return hook


def check_peers(running: Running, pixels: dict[str, Any]) -> None:
    for key in pixels.keys() - {BAD}:
        assert pixel_difference(running.events.pixels_of(key), pixels[key]) <= PIXEL_TOLERANCE


class FailsWith:
    """Fails a step, once or always, when it has a certain row in it."""

    def __init__(self, inner: Any, error: Exception, marked: Any, at_calls: Sequence[int]) -> None:
        self.device, self.latent_shape = inner.device, inner.latent_shape
        self.num_conditions = inner.num_conditions
        self.num_levels, self.decode_half = inner.num_levels, inner.decode_half
        self.num_outer, self.patch_multiple = inner.num_outer, inner.patch_multiple
        self._inner, self._error, self._marked, self._at = inner, error, marked, at_calls
        self._marked_prepared: Any = None
        self.num_calls = 0
        self.sizes: list[int] = []

    def prepare(self, conditioning: Any, deltas: Any = None) -> Any:
        prepared = self._inner.prepare(conditioning, deltas)
        if conditioning is self._marked:
            self._marked_prepared = prepared
        return prepared

    def encode_half(self, batch: Any) -> Any:
        self.num_calls += 1
        self.sizes.append(len(batch.prepared))
        has_it = any(one is self._marked_prepared for one in batch.prepared)
        if has_it and (not self._at or self.num_calls in self._at):
            raise self._error
        return self._inner.encode_half(batch)
