"""Ranks in processes of their own over gloo, which call models for tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.dit.executor import PreparedPrompt
from ray_cluster.engine.groups.loading import load_rank
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.groups.ranks import GuidanceRows
from ray_cluster.engine.groups.sharded import ShardedDiT
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import RayClusterError
from tests.engine.harness import pool

NUM_RANKS = 4
DEGREES = (1, 2, 4)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank keeps of a request.

    Attributes:
        folder: of the model.
        deltas: by the path of a layer.
    """

    key: str
    folder: Path
    conditioning: Conditioning
    deltas: Mapping[str, Delta] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a request's model.

    Attributes:
        latents: ``[C, h, w]``.
        acts_as: the rank that a process takes itself for; None for its own.
    """

    key: str
    latents: Tensor
    timestep: float
    scale: float
    ranks: range
    rows: GuidanceRows = "together"
    acts_as: int | None = None


class RankProcesses:
    """Processes that have met, and wait for calls until they are closed.

    They are copies of one that has imported all: doing so in each would take seconds.

    Args:
        store: a file by which they meet.
    """

    def __init__(self, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            link, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(link)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def keep(self, kept: Kept, on: Sequence[int] = range(NUM_RANKS)) -> None:
        """Have ranks keep a request, in place of what they had under its key."""
        self._ask(dict.fromkeys(on, kept))

    def predict(self, *calls: Call) -> list[Tensor]:
        """Make calls on sets of ranks that have none in common, at once; what each predicts."""
        found = self._ask({rank: call for call in calls for rank in call.ranks})
        return [self._of_set([found[rank] for rank in call.ranks], call) for call in calls]

    def predict_unlike(self, by_rank: Mapping[int, Call]) -> Tensor:
        """Make a call that the ranks of a set are not given alike."""
        found = self._ask(by_rank)
        return self._of_set([found[rank] for rank in by_rank], by_rank[min(by_rank)])

    def _of_set(self, found: Sequence[object], call: Call) -> Tensor:
        [rows] = [one for one in found if isinstance(one, Tensor)]
        return rows.unflatten(0, call.latents.shape[1:]).permute(2, 0, 1)

    def _ask(self, tasks: Mapping[int, Kept | Call]) -> dict[int, object]:
        for rank, task in tasks.items():
            self._links[rank].send_bytes(pickle.dumps(task))
        found = {rank: self._answer(rank) for rank in tasks}
        for answer in found.values():
            if isinstance(answer, Exception):
                raise answer
        return found

    def _answer(self, rank: int) -> object:
        if not self._links[rank].poll(_TIMEOUT_S):
            raise TimeoutError(f"rank {rank} does not answer")
        return pickle.loads(self._links[rank].recv_bytes())


def _serve(rank: int, store: Path, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    prepare_threads(1)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("ranks", FileStore(str(store), NUM_RANKS)),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    with torch.inference_mode():
        served = _Rank(RankSets.build(rank, NUM_RANKS, DEGREES, torch.device("cpu")))
        while True:
            try:
                task = pickle.loads(link.recv_bytes())
            except (EOFError, ConnectionResetError):
                # without destroying what others may be in
                os._exit(0)
            try:
                answer: object = served.do(task)
            except (RayClusterError, RuntimeError, ValueError) as error:
                answer = error
            link.send_bytes(pickle.dumps(answer))


class _Rank:
    """What a rank has loaded and keeps."""

    def __init__(self, sets: RankSets) -> None:
        self._sets = sets
        self._executors: dict[tuple[Path, int], ShardedDiT] = {}
        self._kept: dict[str, tuple[Path, PreparedPrompt, LayerDeltas | None]] = {}

    def do(self, task: Kept | Call) -> Tensor | None:
        """Keep a request, or call its model."""
        if isinstance(task, Call):
            return self._predict(task)
        executor = self._executor(task.folder, self._sets.rank)
        deltas = None if task.deltas is None else executor.bind(task.deltas)
        prepared = executor.prepare(task.conditioning, deltas)
        self._kept[task.key] = (task.folder, prepared, deltas)
        return None

    def _executor(self, folder: Path, rank: int) -> ShardedDiT:
        key = (folder, rank)
        if key not in self._executors:
            sets = replace(self._sets, rank=rank)
            self._executors[key] = load_rank(pool(folder), sets, codes=False).executor
        return self._executors[key]

    def _predict(self, call: Call) -> Tensor | None:
        folder, prepared, deltas = self._kept[call.key]
        executor = self._executor(folder, self._sets.rank if call.acts_as is None else call.acts_as)
        _, height, width = call.latents.shape
        composition, _ = composition_of([(height, width, len(prepared.tokens) == 2)])
        batch = StepBatch(
            layout_of(composition, executor.num_levels),
            call.latents.permute(1, 2, 0).flatten(0, 1),
            torch.tensor([call.timestep]),
            (prepared,),
            torch.tensor([call.scale]),
            deltas=() if deltas is None else (deltas,),
        )
        return executor.predict(batch, call.ranks, call.rows)
