"""The ranks of a group as its head has them: started, asked, and started again when one is lost.

Ranks that have lost one of them cannot go on: a collective waits for it. So all are killed and
started anew, and are told again what they are to keep. States are the head's: of a request, the
step in flight is lost.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.groups.ranks import RankDeltas, RankStep, StepEnd
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import InvalidRequest, ModelUnsupported, RequestFailed
from ray_cluster.protocol.groups import (
    FROM_RANK,
    TO_RANK,
    Answer,
    Bind,
    Forget,
    GroupStart,
    Hello,
    Keep,
    Refusal,
    SetStep,
    ToRank,
    Unbind,
    Up,
)
from ray_cluster.replica.frames import framed, tensors_of
from ray_cluster.replica.group.processes import RankProcess, StartRank, kill_process
from ray_cluster.transport.connecting import Listener, listen
from ray_cluster.transport.links import Bytes, Link, LinkClosed, Message

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# until all ranks have loaded
START_S = 900.0
# in which a call must have ended, and a step while nobody knows how long one takes
_CALL_BOUND_S = 120.0
_CHECK_S = 0.25
# in which killed ranks are gone, if they can be
_GRACE_S = 1.0
# tries of a call that was lost with the ranks
_TRIES = 3
# starts one after the other that have failed, until the group is given up
_MOST_STARTS = 3


class RanksLost(Exception):
    """The ranks that were to answer are gone; others are being started."""


@dataclass(slots=True, eq=False)
class _World:
    """One life of all ranks.

    Attributes:
        pids: by rank, of those that have found this process.
        ups: what those that have loaded say of themselves.
        is_lost: whether it is to be ended, or is.
    """

    number: int
    processes: list[RankProcess] = field(default_factory=list)
    links: dict[int, Link] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    ups: dict[int, Up] = field(default_factory=dict)
    contents: tuple[bytes, ...] = ()
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class _InFlight:
    """A step or a call that ranks are at.

    Attributes:
        due_s: when it counts as hanging.
        left: ranks that have not answered.
        ranks: that are at it.
        step: the engine's number of a step; None for a call.
        future: of a call; None for a step.
    """

    began_s: float
    due_s: float
    left: set[int]
    ranks: Collection[int]
    step: int | None = None
    future: Future[dict[str, Tensor]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    conditioning: Conditioning
    deltas: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    content: bytes
    has_prompts: bool


class GroupRanks:
    """The :class:`~ray_cluster.engine.groups.ranks.Ranks` of a group in processes of this node.

    Args:
        pool: its section of the configuration, as JSON.
        start_rank: starts one.

    Attributes:
        bound_s: in which a step must have ended, or its ranks count as lost.
        num_recoveries: times that all ranks were started again.
        recovery_s: seconds that the last one took, until they were there.
    """

    def __init__(
        self,
        pool: str,
        num_ranks: int,
        start_rank: StartRank,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_ranks = num_ranks
        self._pool, self._start_rank, self._clock = pool, start_rank, clock
        self._on_news: Callable[[], None] = lambda: None
        self.bound_s = _CALL_BOUND_S
        self._changed = threading.Condition()
        self._world: _World | None = None
        self._is_up = False
        self._is_back = False
        self._is_closed = False
        self._error: str | None = None
        self._why = ""
        self._numbers = itertools.count(1)
        self._kept: dict[int, _Kept] = {}
        self._bound: dict[int, _Bound] = {}
        self._flying: dict[int, _InFlight] = {}
        self._ends: deque[StepEnd] = deque()
        self.num_recoveries = 0
        self.recovery_s = 0.0
        # by itself it would listen on all addresses, and it asks nobody who they are
        listener = socket.create_server((_HOST, 0))
        self._store = TCPStore(
            _HOST,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_S),
            master_listen_fd=listener.detach(),
        )
        self._listener: Listener = listen(_HOST, self._serve)
        self._starting = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._starting.start()

    # what the engine asks for

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def has_news(self) -> bool:
        return bool(self._ends) or self._is_back

    def call_when_news(self, wake: Callable[[], None]) -> None:
        """Have something called whenever :attr:`has_news` becomes true."""
        self._on_news = wake

    def keep(self, conditioning: Conditioning, deltas: LayerDeltas | None) -> int:
        """See :meth:`Ranks.keep`."""
        number = deltas.number if isinstance(deltas, RankDeltas) else None
        with self._changed:
            key = next(self._numbers)
            kept = self._kept[key] = _Kept(conditioning, number)
            self._tell_all(*_keep(key, kept))
        return key

    def forget(self, key: int) -> None:
        """See :meth:`Ranks.forget`."""
        with self._changed:
            if self._kept.pop(key, None) is not None:
                self._tell_all(Forget(key))

    def begin(self, step: RankStep) -> None:
        """See :meth:`Ranks.begin`."""
        sent = framed({"latents": step.latents})
        # the engine's numbers are not those of calls
        number = next(self._numbers)
        head = SetStep(
            number,
            step.key,
            step.ranks.start,
            len(step.ranks),
            step.rows,
            *step.latent_hw,
            step.timestep,
            step.guidance_scale,
            sent.specs[0],
        )
        with self._changed:
            now_s = self._clock()
            self._flying[number] = _InFlight(
                now_s, now_s + self.bound_s, {step.ranks.start}, step.ranks, step.call
            )
            if not self._is_up or not self._send(step.ranks, head, sent.frames):
                self._end_lost([number])

    def ends(self) -> Sequence[StepEnd]:
        """See :meth:`Ranks.ends`."""
        with self._changed:
            found = list(self._ends)
            self._ends.clear()
            self._is_back = False
        return found

    def bind(self, deltas: Mapping[str, Delta], *, has_prompts: bool = False) -> RankDeltas:
        """Have the ranks bind deltas; see :meth:`Ranks.bind`.

        Args:
            has_prompts: whether they are of text encoders, whose names the paths begin with: that
                rank alone has them which codes.
        """
        bound = _Bound(_content(deltas), has_prompts)
        with self._changed:
            number = next(self._numbers)
        ranks = [self.num_ranks - 1] if has_prompts else list(range(self.num_ranks))
        frame = torch.frombuffer(bytearray(bound.content), dtype=torch.uint8).numpy()
        self.call(lambda call: Bind(call, number, has_prompts), (frame,), ranks)
        with self._changed:
            self._bound[number] = bound
        found = RankDeltas(number, len(deltas))
        # requests that have them keep them
        weakref.finalize(found, self._unbind, number)
        return found

    def _unbind(self, number: int) -> None:
        with self._changed:
            if self._bound.pop(number, None) is not None:
                self._tell_all(Unbind(number))

    def call(
        self,
        head: Callable[[int], ToRank],
        frames: Sequence[Bytes],
        ranks: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Ask ranks for something, the one that codes unless others are named, and wait for it.

        What is lost with the ranks is asked again of the next.

        Args:
            head: from the number of the call.

        Raises:
            InvalidRequest, ModelUnsupported, RequestFailed: they say so, or are lost too often.
        """
        for _ in range(_TRIES):
            future: Future[dict[str, Tensor]] = Future()
            asked = set([self.num_ranks - 1] if ranks is None else ranks)
            with self._changed:
                self._changed.wait_for(lambda: self._is_up or self._is_over, START_S)
                if self._is_over:
                    break
                number, now_s = next(self._numbers), self._clock()
                due_s = now_s + _CALL_BOUND_S
                self._flying[number] = _InFlight(now_s, due_s, set(asked), asked, future=future)
                if not self._is_up or not self._send(asked, head(number), frames):
                    self._end_lost([number])
            try:
                return future.result()
            except RanksLost:
                continue
        raise RequestFailed("the ranks of the group were lost with it", "denoise")

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None

    # of the head's process

    def wait_up(self) -> tuple[Mapping[int, Up], Sequence[bytes]]:
        """Wait for the first start; return what the ranks say, and the tokenizers' contents.

        Raises:
            RuntimeError: they do not start.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_up or self._is_over, START_S * _MOST_STARTS)
            if not self._is_up or self._world is None:
                raise RuntimeError(f"the ranks do not start: {self._error or 'it took too long'}")
            return dict(self._world.ups), self._world.contents

    def check_alive(self) -> None:
        """Raise RuntimeError where the ranks cannot be started any more."""
        if self._error is not None:
            raise RuntimeError(f"the group is given up: {self._error}")

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that are up."""
        with self._changed:
            return {} if self._world is None else dict(self._world.pids)

    def close(self) -> None:
        """End all ranks."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._starting.join()
        self._listener.close()

    # the thread that starts ranks, and looks after what hangs

    def _run(self) -> None:
        try:
            self._keep_up()
        except Exception as error:
            # nobody else would say it to those who wait
            logger.exception("the ranks cannot be started")
            with self._changed:
                self._error = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            if self._world is not None:
                self._end(self._world)

    def _keep_up(self) -> None:
        """Start ranks, and start them again whenever they are lost."""
        failures, began_s = 0, self._clock()
        while not self._is_over:
            world = self._started()
            with self._changed:
                is_there = self._wait_there(world)
                if is_there:
                    took_s = self._clock() - began_s
                    failures, self.recovery_s = 0, took_s if self.num_recoveries else 0.0
                    self._open(world)
            if is_there:
                self._on_news()
                self._watch(world)
                began_s = self._clock()
            else:
                failures += 1
            self._end(world)
            with self._changed:
                if failures >= _MOST_STARTS and not self._is_closed:
                    self._error = f"its ranks have failed to start {failures} times: {self._why}"
                self.num_recoveries += not self._is_over
                self._changed.notify_all()

    def _wait_there(self, world: _World) -> bool:
        """Wait, under the lock, until all ranks have loaded; returns whether they have."""
        until_s = self._clock() + START_S
        while len(world.ups) < self.num_ranks and not (world.is_lost or self._is_closed):
            self._changed.wait(_CHECK_S)
            if self._clock() > until_s:
                self._lose(world, "the ranks take too long to load")
            elif any(one.has_ended() for one in world.processes):
                self._lose(world, "a rank has ended while it loaded")
        return not (world.is_lost or self._is_closed)

    def _started(self) -> _World:
        world = _World(next(self._numbers))
        with self._changed:
            self._world = world
        for rank in range(self.num_ranks):
            world.processes.append(
                self._start_rank(
                    GroupStart(
                        self._pool,
                        rank,
                        self.num_ranks,
                        self._listener.target,
                        self._listener.secret,
                        f"{_HOST}:{self._store.port}",
                        world.number,
                        START_S,
                    )
                )
            )
        return world

    def _open(self, world: _World) -> None:
        """Tell new ranks what they are to keep, and let them work."""
        self._is_up = True
        everybody = range(self.num_ranks)
        for number, bound in self._bound.items():
            frame = torch.frombuffer(bytearray(bound.content), dtype=torch.uint8).numpy()
            ranks = everybody[-1:] if bound.has_prompts else everybody
            # nobody waits for the answers: it was bound before
            self._send(ranks, Bind(-1, number, bound.has_prompts), (frame,))
        for key, kept in self._kept.items():
            head, frames = _keep(key, kept)
            self._send(everybody, head, frames)
        self._is_back = True
        self._changed.notify_all()
        logger.info("the ranks are up: world %d", world.number)

    def _watch(self, world: _World) -> None:
        """Wait until a world is lost, and lose it when something hangs."""
        with self._changed:
            while not (world.is_lost or self._is_closed):
                self._changed.wait(_CHECK_S)
                now_s = self._clock()
                hanging = [one for one in self._flying.values() if one.due_s <= now_s]
                if hanging:
                    why = f"ranks {sorted(hanging[0].left)} are silent"
                    self._lose(world, why, hanging[0].ranks)

    def _lose(self, world: _World, why: str, first: Collection[int] = ()) -> None:
        """Give a world up; its ranks are killed by the thread that started them.

        Args:
            first: ranks that were lost first, and took the others with them.
        """
        if world.is_lost:
            return
        world.is_lost, self._why = True, self._why if self._why.startswith("rank ") else why
        if not self._is_closed:
            logger.error("%s: all ranks are started again", why)
        if world is self._world:
            self._is_up = False
            self._end_lost(list(self._flying), first)
        self._changed.notify_all()

    def _end(self, world: _World) -> None:
        with self._changed:
            self._lose(world, "it is over")
        for process in world.processes:
            process.kill()
        until_s = time.monotonic() + _GRACE_S
        while not all(one.has_ended() for one in world.processes) and time.monotonic() < until_s:
            time.sleep(0.01)
        # one that was stopped does not hear of it
        for rank, pid in world.pids.items():
            if not world.processes[rank].has_ended():
                kill_process(pid)
        for link in world.links.values():
            link.close()

    # links

    def _serve(self, link: Link) -> None:
        """Read what a rank says until it is gone."""
        world: _World | None = None
        why = "a rank is gone"
        try:
            while True:
                message = link.receive()
                world = self._take(link, world, message)
        except LinkClosed as closed:
            why = f"a rank is gone ({closed})"
        except Exception as error:
            logger.exception("what a rank says is not understood")
            why = f"a rank is not understood ({error})"
        finally:
            link.close()
            if world is not None:
                with self._changed:
                    own = [rank for rank, one in world.links.items() if one is link]
                    self._lose(world, why, own)

    def _take(self, link: Link, world: _World | None, message: Message) -> _World | None:
        head = FROM_RANK.decode(message.head)
        try:
            if isinstance(head, Hello):
                with self._changed:
                    world = self._world
                    assert world is not None, "ranks are started by one"
                    if world.number != head.world:
                        raise ValueError(f"rank {head.rank} is of the earlier world {head.world}")
                    world.links[head.rank], world.pids[head.rank] = link, head.pid
            elif isinstance(head, Up):
                assert world is not None, "it has said hello"
                contents = tuple(frame.tobytes() for frame in message.frames)
                with self._changed:
                    world.ups[head.rank] = head
                    world.contents = contents or world.contents
                    self._changed.notify_all()
            elif isinstance(head, Answer):
                self._answered(head, tensors_of(head.frames, message.frames))
            else:
                self._refused(world, head)
        finally:
            message.release()
        return world

    def _answered(self, answer: Answer, tensors: dict[str, Tensor]) -> None:
        ended_s = self._clock()
        with self._changed:
            flying = self._flying.get(answer.call)
            if flying is None:
                return
            flying.left.discard(answer.rank)
            if flying.left:
                return
            del self._flying[answer.call]
            if flying.future is not None:
                flying.future.set_result(tensors)
                return
            assert flying.step is not None, "it is a step or a call"
            seconds = ended_s - flying.began_s
            self._ends.append(StepEnd(flying.step, seconds, tensors["prediction"]))
        self._on_news()

    def _refused(self, world: _World | None, refusal: Refusal) -> None:
        with self._changed:
            flying = self._flying.get(refusal.call)
            if flying is None or flying.future is None or world is None:
                # the other ranks of its set wait for it
                if world is not None:
                    first = [refusal.rank] if flying is None else flying.ranks
                    self._lose(world, f"rank {refusal.rank}: {refusal.message}", first)
                return
            del self._flying[refusal.call]
        error: Exception
        match refusal.kind:
            case "invalid":
                error = InvalidRequest(refusal.message, refusal.param, refusal.code)
            case "unsupported":
                error = ModelUnsupported(refusal.message)
            case _:
                error = RequestFailed(refusal.message, "denoise")
        flying.future.set_exception(error)

    def _end_lost(self, calls: Sequence[int], first: Collection[int] = ()) -> None:
        """End what ranks were at, under the lock."""
        has_steps = False
        for call in calls:
            flying = self._flying.pop(call, None)
            if flying is None:
                continue
            if flying.future is not None:
                flying.future.set_exception(RanksLost())
            elif flying.step is not None:
                has_steps = True
                is_suspect = not set(first).isdisjoint(flying.ranks)
                self._ends.append(StepEnd(flying.step, 0.0, None, is_suspect))
        if has_steps:
            threading.Thread(target=self._on_news, daemon=True).start()

    def _tell_all(self, head: ToRank, frames: Sequence[Bytes] = ()) -> None:
        if self._is_up:
            self._send(range(self.num_ranks), head, frames)

    def _send(self, ranks: Sequence[int] | set[int], head: ToRank, frames: Sequence[Bytes]) -> bool:
        """Send a message to ranks; returns whether they were there."""
        world, content = self._world, TO_RANK.encode(head)
        assert world is not None, "it is up"
        try:
            for rank in ranks:
                world.links[rank].send(content, frames)
        except (LinkClosed, KeyError):
            self._lose(world, "a rank is gone")
            return False
        return True


def _keep(key: int, kept: _Kept) -> tuple[Keep, Sequence[Bytes]]:
    sent = framed(kept.conditioning.tensors())
    return Keep(key, kept.deltas, sent.specs), sent.frames


def _content(deltas: Mapping[str, Delta]) -> bytes:
    """Return deltas as safetensors.

    Raises:
        ModelUnsupported: one is no low-rank product.
    """
    tensors: dict[str, Tensor] = {}
    for path, one in deltas.items():
        if not isinstance(one, LowRank):
            raise ModelUnsupported(f"{path} has no low-rank product; a group takes no other")
        window = torch.tensor([one.stride, one.padding])
        tensors |= {
            f"{path}:shrink": one.shrink.contiguous().clone(),
            f"{path}:expand": one.expand.contiguous().clone(),
            f"{path}:window": window,
        }
    return save_tensors(tensors)
