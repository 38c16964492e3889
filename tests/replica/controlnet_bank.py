"""A small real computation behind the interface of a ControlNet, and processes that serve it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.engine.controlnets.bank import BankRow
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.protocol.leases import Directory, Endpoint, Peer
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.transport.connecting import listen

NAME = "edges"
PATIENCE_S = 30.0


class RandomBank:
    """Fixed random maps of latents, timestep, prompt and control map; each row alone.

    Args:
        max_kept: requests that it keeps at most.
    """

    def __init__(self, max_kept: int = 100, delay_s: float = 0.0) -> None:
        self._max_kept = max_kept
        self._delay_s = delay_s
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        generator = torch.Generator().manual_seed(0)
        self._weights = torch.randn(3, 64, 64, generator=generator)
        self.batches: list[list[str]] = []

    def knows(self, key: str) -> bool:
        return key in self._kept

    def open(self, key: str, conditioning: Conditioning, control_map: Tensor) -> None:
        if conditioning.prompt_embeds.isnan().any():
            raise ValueError("a prompt that is none")
        prompts = [one.float().mean() for one in conditioning.tensors().values()]
        self._kept[key] = torch.stack(prompts).sum() + control_map.float().mean()
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def close(self, key: str) -> None:
        self._kept.pop(key, None)

    def compute(self, rows: Sequence[BankRow]) -> list[RowResiduals]:
        self.batches.append([row.key for row in rows])
        time.sleep(self._delay_s)
        return [self._row(row) for row in rows]

    def _row(self, row: BankRow) -> RowResiduals:
        if row.timestep < 0:
            raise ValueError("a timestep below 0")
        given = row.latents.float() * (1 + row.timestep) + self._kept[row.key]
        flat = given.flatten()[:64].repeat(64)[:64]
        first, second, third = (torch.outer(flat, one[0]) + one for one in self._weights)
        return RowResiduals((first, second.bfloat16()), third.half())


def ask_of(
    seed: int, *, step: int = 0, deadline_s: float | None = None, name: str = NAME
) -> ControlNetAsk:
    """A step of the request of a seed; with a deadline an hour away unless given."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator}
    return ControlNetAsk(
        name=name,
        key=f"request-{seed}/0",
        conditioning=Conditioning(
            torch.randn(7, 16, **draw).bfloat16(), torch.randn(7, 16, **draw).bfloat16()
        ),
        map=torch.randint(0, 256, (8 + seed % 3, 16, 3), dtype=torch.uint8, **draw),
        latents=torch.randn(4, 4 + seed % 3, 8, **draw) + step,
        timestep=float(1000 - step),
        deadline_s=time.monotonic() + 3600 if deadline_s is None else deadline_s,
    )


def expected(ask: ControlNetAsk) -> RowResiduals:
    bank = RandomBank()
    bank.open(ask.key, ask.conditioning, ask.map)
    return bank.compute([BankRow(ask.key, ask.latents, ask.timestep)])[0]


def is_same(found: RowResiduals, wanted: RowResiduals) -> bool:
    """Whether residuals agree in every bit."""
    pairs = zip((*found.down, found.mid), (*wanted.down, wanted.mid), strict=True)
    return all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in pairs
    )


def directory(*peers: Peer) -> Directory:
    return Directory("+".join(one.replica_id for one in peers), peers)


def peer_of(target: str, secret: str, replica_id: str, name: str = NAME) -> Peer:
    return Peer("control", name, replica_id, "node", Endpoint(target, secret))


class Forked:
    """A process that the factory has forked."""

    def __init__(self, process_id: str) -> None:
        self._process_id = int(process_id)
        self._is_killed = False

    def stop(self) -> None:
        os.kill(self._process_id, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process_id, signal.SIGCONT)

    def kill(self) -> None:
        if not self._is_killed:
            os.kill(self._process_id, signal.SIGKILL)
        self._is_killed = True


class BankProcess(Forked):
    """A worker of a ControlNet in another process."""

    def __init__(self, replica_id: str, target: str, secret: str, process_id: str) -> None:
        super().__init__(process_id)
        self.peer = peer_of(target, secret, replica_id)


class BankFactory:
    """A process that has imported everything, and forks others when it is asked to."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.replica.controlnet_bank"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._made: list[Forked] = []

    def make(self, delay_s: float = 0.0) -> BankProcess:
        """Return a worker."""
        made = BankProcess(f"r{len(self._made)}", *self._fork("serve", str(delay_s)))
        self._made.append(made)
        return made

    def ask_for_ever(self, peer: Peer) -> Forked:
        """Return a base model's replica that has some answers of a worker, and asks for more."""
        self._made.append(Forked(*self._fork("ask", peer.endpoint.target, peer.endpoint.secret)))
        return self._made[-1]

    def _fork(self, *words: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{' '.join(words)}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().split()

    def kill_all(self) -> None:
        """Kill the workers, but not the factory."""
        for one in self._made:
            one.kill()

    def close(self) -> None:
        self.kill_all()
        self._process.communicate()


def _fork_all() -> None:
    # nobody waits for them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        parent = os.getpid()
        kind, *words = line.split()
        if os.fork() == 0:
            if kind == "serve":
                _serve(float(words[0]), parent)
            _ask(words[0], words[1], parent)


def _ask(target: str, secret: str, parent: int) -> None:
    controls = RemoteControlNets(clock=time.monotonic, on_ready=lambda: None)
    controls.set_peers(directory(peer_of(target, secret, "r0")))
    step = 0
    while os.getppid() == parent:
        futures = controls.ask([ask_of(seed, step=step) for seed in range(8)])
        futures[0].result()
        if step == 3:
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
        step += 1
    os._exit(0)


def _serve(delay_s: float, parent: int) -> None:
    server = ControlNetServer(NAME, RandomBank(delay_s=delay_s), max_batch=8, clock=time.monotonic)
    server.start()
    listener = listen("127.0.0.1", server.accept)
    sys.stdout.write(f"{listener.target} {listener.secret} {os.getpid()}\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    _fork_all()
