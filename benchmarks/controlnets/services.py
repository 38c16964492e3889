"""ControlNets in processes of their own, as their workers run them, without Ray."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil
import torch

from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.protocol.leases import Directory, Endpoint, Peer
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.transport.connecting import listen

MODELS: Mapping[str, str] = {"edges": "shapes-sd-edges", "layout": "shapes-sd-layout"}
_HOST = "127.0.0.1"
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Services:
    """Running services.

    Attributes:
        controls: calls them.
        directory: where they are.
        process_ids: of their processes.
    """

    controls: RemoteControlNets
    directory: Directory
    process_ids: tuple[int, ...]

    def cpu_s(self) -> float:
        """Return the CPU seconds that their processes have taken."""
        times = (psutil.Process(one).cpu_times() for one in self.process_ids)
        return sum(one.user + one.system for one in times)


def arguments_of(name: str) -> ControlNetConfig:
    """Return how a built-in ControlNet is started."""
    return ControlNetConfig(name=name, model=MODELS[name], bases=("benchmark",))


@contextmanager
def services(*, shares_memory: bool = True) -> Iterator[Services]:
    """Run a process for each built-in ControlNet within the block.

    Args:
        shares_memory: whether links go through shared memory; over TCP otherwise.
    """
    context = multiprocessing.get_context("spawn")
    started, peers = [], []
    try:
        for name in MODELS:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, theirs, shares_memory))
            process.start()
            started.append((process, ours))
        for (_, ours), name in zip(started, MODELS, strict=True):
            target, secret = ours.recv()
            peers.append(Peer("control", name, name, _HOST, Endpoint(target, secret)))
        controls = RemoteControlNets(clock=time.monotonic)
        directory = Directory("1", tuple(peers))
        controls.set_peers(directory)
        try:
            ids = tuple(process.pid or 0 for process, _ in started)
            yield Services(controls, directory, ids)
        finally:
            controls.close()
    finally:
        for process, ours in started:
            ours.close()
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(name: str, pipe: Connection, shares_memory: bool) -> None:
    prepare_threads(1)
    bank = load_bank(arguments_of(name), torch.device("cpu"))
    server = ControlNetServer(name, bank, max_batch=8, clock=time.monotonic)
    server.start()
    listener = listen(_HOST, server.accept, shares_memory=shares_memory)
    pipe.send((listener.target, listener.secret))
    with suppress(EOFError):
        # until the other end is closed
        pipe.recv()
    listener.close()
    server.stop()
