"""An executor whose model calls are replayed from CUDA graphs, one for each composition.

A model call launches thousands of small kernels; where they are short (small images, few rows) the
host is slower than the device. A graph launches all of them at once. Whether that pays is measured
by ``benchmarks/gpu``; a pool uses it with ``cuda_graphs: auto``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.step.executor import Executor, PreparedT, Residuals, StepBatch
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import MODEL_ERRORS, ConfigError

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
"""Runs a function once while what it asks of the device is written down; returns where its result
is, and what does the same again on the same memory."""

MAX_GRAPHS = 8


class GraphedExecutor(Generic[PreparedT]):
    """Runs both halves of another executor as one CUDA graph per composition of a batch.

    The first batch of a composition (and of prompts of these lengths) is run twice, once to let
    libraries and compilers prepare and once to capture it. Later ones are copied into the memory
    that the graph reads, prompts only where they are others than in the batch before. A graph
    keeps the memory of its activations, which all of them share: one runs at a time, and its result
    is copied out. The least recently used one is dropped for a new one.

    With residuals between the halves, deltas or reuse, the call runs as without a graph, and so do
    compositions of which the capture has failed. While one is captured other threads may use the
    device, as the stages around the step thread do.

    Args:
        executor: on a CUDA device, its weights there too (not offloaded).
        max_graphs: kept at a time.
        capture: how it is captured; another one in tests.

    Raises:
        ConfigError: the executor is not on a CUDA device.
    """

    def __init__(
        self,
        executor: Executor[PreparedT, Any],
        *,
        max_graphs: int = MAX_GRAPHS,
        capture: Capture | None = None,
    ) -> None:
        if capture is None and executor.device.type != "cuda":
            raise ConfigError(
                f"CUDA graphs need a model on a CUDA device, given {executor.device}; "
                "use the executor itself"
            )
        self._executor = executor
        self._max_graphs = max_graphs
        self._capture = capture or GraphCapture()
        # None where the capture failed
        self._graphs: OrderedDict[Hashable, _Graph[PreparedT] | None] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return self._executor.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self._executor.dtype

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._executor.num_levels

    @property
    def num_conditions(self) -> int:
        """Channels that the model takes beside the latents."""
        return self._executor.num_conditions

    @property
    def num_outer(self) -> range:
        """Numbers of outer blocks within which it can keep and reuse what it makes."""
        return self._executor.num_outer

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of."""
        return self._executor.patch_multiple

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        return self._executor.latent_shape(width_px, height_px)

    @property
    def layers(self) -> Mapping[str, nn.Linear | nn.Conv2d]:
        """The layers that :meth:`bind` knows."""
        return self._executor.layers

    def bind(self, deltas: Mapping[str, Delta]) -> LayerDeltas:
        """Return deltas for requests of this model; see :meth:`Executor.bind`."""
        return self._executor.bind(deltas)

    def merged(self, deltas: LayerDeltas) -> MergedWeights:
        """Return merged weights; graphs, which know where the former ones are, go as these do."""
        found = self._executor.merged(deltas)
        found.on_exchange = self.clear
        return found

    def prepare(self, conditioning: Conditioning, deltas: LayerDeltas | None = None) -> PreparedT:
        """Compute what stays the same in all steps of a request; never from a graph."""
        return self._executor.prepare(conditioning, deltas)

    def encode_half(self, batch: StepBatch[PreparedT]) -> StepBatch[PreparedT]:
        """Return the batch: a graph has both halves."""
        return batch

    def cut(
        self,
        _encoded: StepBatch[PreparedT],
        batch: StepBatch[PreparedT],
        _keeps: Sequence[bool],
    ) -> StepBatch[PreparedT]:
        """Return the batch of those that are kept."""
        return batch

    @torch.inference_mode()
    def decode_half(
        self, encoded: StepBatch[PreparedT], residuals: Residuals | None = None
    ) -> Tensor:
        """Return the prediction after guidance, ``[M, C]`` float32."""
        if residuals is None and not any(encoded.deltas) and not any(encoded.reuse):
            graph = self._graph(encoded)
            if graph is not None:
                return graph(encoded)
        halfway = self._executor.encode_half(encoded)
        return self._executor.decode_half(halfway, residuals)

    def _graph(self, batch: StepBatch[PreparedT]) -> _Graph[PreparedT] | None:
        """Return the graph of a batch's composition; None where it cannot be captured."""
        key = _key(batch)
        if key not in self._graphs:
            # dropped first: there may be no memory for both
            while len(self._graphs) >= self._max_graphs:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._captured(batch)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _captured(self, batch: StepBatch[PreparedT]) -> _Graph[PreparedT] | None:
        # with the caller's prompts: what an executor keeps of the latest ones, stacked, must not be
        # there already when those that the graph reads are stacked in it. If this fails, so would
        # the call without a graph
        self._executor.decode_half(self._executor.encode_half(batch))
        try:
            return _Graph(self._executor, batch, self._capture)
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            sizes = [(one.width, one.height, one.num_images) for one in batch.layout.composition]
            logger.warning("no CUDA graph of %s, it runs without: %s", sizes, error)
            return None

    def clear(self) -> None:
        """Drop all graphs and what they keep."""
        self._graphs.clear()


class _Graph(Generic[PreparedT]):
    """One composition: the memory that is read, what was captured, and where the result is."""

    def __init__(
        self, executor: Executor[PreparedT, Any], batch: StepBatch[PreparedT], capture: Capture
    ) -> None:
        self._inputs = replace(
            batch,
            latents=batch.latents.clone(),
            timesteps=batch.timesteps.clone(),
            guidance_scales=batch.guidance_scales.clone(),
            prepared=tuple(_copy(one) for one in batch.prepared),
        )
        self._prepared = batch.prepared
        self._kept: Any = None

        def run() -> Tensor:
            # tables made before the capture are in the graph as addresses: they must stay
            self._kept = executor.encode_half(self._inputs)
            return executor.decode_half(self._kept)

        self._output, self._replay = capture(run)

    def __call__(self, batch: StepBatch[PreparedT]) -> Tensor:
        """Return the prediction for a batch of this composition, in memory of its own."""
        inputs = self._inputs
        inputs.latents.copy_(batch.latents)
        inputs.timesteps.copy_(batch.timesteps)
        inputs.guidance_scales.copy_(batch.guidance_scales)
        for mine, last, new in zip(inputs.prepared, self._prepared, batch.prepared, strict=True):
            if new is not last:
                for goal, source in zip(_tensors(mine), _tensors(new), strict=True):
                    goal.copy_(source)
        self._prepared = batch.prepared
        self._replay()
        return self._output.clone()


@dataclass(slots=True)
class _Captured:
    """A graph, and that it is replayed on its device."""

    graph: torch.cuda.CUDAGraph
    device: torch.device

    def __call__(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


class GraphCapture:
    """Captures functions on the current CUDA device, each of which has run once before."""

    def __init__(self) -> None:
        # of all graphs of an executor
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run a function and return where its result is, and what does the same again."""
        device = torch.device("cuda", torch.cuda.current_device())
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads decode and encode meanwhile: what they do is not this graph's
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return output, _Captured(graph, device)


def _key(batch: StepBatch[Any]) -> Hashable:
    prompts = tuple(
        tuple((tuple(part.shape), part.dtype) for part in _tensors(one)) for one in batch.prepared
    )
    return batch.layout.composition, batch.latents.shape[1], batch.latents.dtype, prompts


def _tensors(prepared: Any) -> list[Tensor]:
    """Return the tensors of what an executor made of a prompt."""
    parts = tree_leaves([getattr(prepared, one.name) for one in fields(prepared)])
    return [part for part in parts if isinstance(part, Tensor)]


def _copy(prepared: Any) -> Any:
    parts = {one.name: getattr(prepared, one.name) for one in fields(prepared)}
    return replace(prepared, **tree_map_only(Tensor, torch.clone, parts))
