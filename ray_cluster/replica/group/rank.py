"""One rank of a group: it steps with the others, and the last one encodes and decodes, too.

A thread reads the head's messages, so that the rank ends as soon as the head is gone, even in the
midst of a collective that never ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ray_cluster.config.loading import set_environment
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.low_rank import LowRank, packed
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.dit.executor import PreparedPrompt
from ray_cluster.engine.files.weights import DTYPE_BY_NAME
from ray_cluster.engine.groups.loading import LoadedRank, load_rank
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.stages.prompt_encoder import PromptDeltas
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import InvalidRequest, ModelUnsupported, RayClusterError
from ray_cluster.protocol.groups import (
    FROM_RANK,
    REQUESTS,
    TO_RANK,
    Answer,
    Bind,
    Decode,
    Encode,
    EncodeImages,
    Forget,
    FromRank,
    GroupStart,
    Hello,
    Keep,
    Refusal,
    SetStep,
    Unbind,
    Up,
)
from ray_cluster.replica.frames import framed, tensors_of
from ray_cluster.transport.connecting import connect
from ray_cluster.transport.links import Bytes, Link, LinkClosed, Message

logger = logging.getLogger(__name__)

_FORMATS = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
# while the others load
_MEET_S = 600.0


def run_rank(start: GroupStart) -> None:
    """Serve a head until it closes the link, or the process ends."""
    pool = PoolConfig.model_validate_json(start.pool)
    prepare_threads(pool.num_threads)
    link = connect(start.target, start.secret, timeout_s=30.0)
    link.send(FROM_RANK.encode(Hello(start.rank, start.world, os.getpid())))
    tasks = _Inbox(link)
    try:
        rank = _loaded(start, pool, link)
    except RayClusterError as error:
        _end_with(link, Refusal(-1, start.rank, "unsupported", str(error)))
    except Exception as error:
        logger.exception("rank %d cannot load", start.rank)
        _end_with(link, Refusal(-1, start.rank, "failed", f"{type(error).__name__}: {error}"))
    with torch.inference_mode():
        rank.serve(tasks)


def _end_with(link: Link, reason: Refusal) -> NoReturn:
    link.send(FROM_RANK.encode(reason))
    link.close()
    logging.shutdown()
    os._exit(1)


def _loaded(start: GroupStart, pool: PoolConfig, link: Link) -> _Rank:
    """Meet the other ranks, and load."""
    # all ranks of a group are on one node: nobody else need reach them
    set_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    if pool.device == "cuda":
        # a child of the head sees all GPUs, an actor its own
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    host, _, port = start.store.rpartition(":")
    store = TCPStore(host, int(port), timeout=timedelta(seconds=_MEET_S))
    dist.init_process_group(
        "nccl" if pool.device == "cuda" else "gloo",
        store=PrefixStore(f"world-{start.world}", store),
        rank=start.rank,
        world_size=start.num_ranks,
        timeout=timedelta(seconds=start.timeout_s),
    )
    codes = start.rank == start.num_ranks - 1
    with torch.inference_mode():
        sets = RankSets.build(start.rank, start.num_ranks, pool.set_degrees, _device(pool))
        return _Rank(start.rank, link, load_rank(pool, sets, codes=codes))


def _device(pool: PoolConfig) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if pool.device == "cuda"
        else (torch.device("cpu"))
    )


class _Inbox:
    """What the head has sent, for the thread that steps and for the one that encodes and decodes.

    Messages are copied: their memory goes back at once.
    """

    def __init__(self, link: Link) -> None:
        self.steps: SimpleQueue[tuple[object, Sequence[Bytes]]] = SimpleQueue()
        self.coding: SimpleQueue[tuple[object, Sequence[Bytes]]] = SimpleQueue()
        self._link = link
        threading.Thread(target=self._read, name="head", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._sort(self._link.receive())
        except LinkClosed as closed:
            logger.info("the head is gone: %s", closed)
        except Exception:
            logger.exception("a message of the head is not understood")
        # the other threads may be in a collective for ever
        logging.shutdown()
        os._exit(0)

    def _sort(self, message: Message) -> None:
        try:
            head = TO_RANK.decode(message.head)
            frames = tuple(frame.copy() for frame in message.frames)
        finally:
            message.release()
        is_coding = isinstance(head, Encode | EncodeImages | Decode)
        if is_coding or (isinstance(head, Bind) and head.has_prompts):
            self.coding.put((head, frames))
            return
        if isinstance(head, Unbind):
            self.coding.put((head, frames))
        self.steps.put((head, frames))


class _Rank:
    """What a rank keeps, and does; each attribute is one thread's."""

    def __init__(self, number: int, link: Link, loaded: LoadedRank) -> None:
        self._number, self._link, self._loaded = number, link, loaded
        self._executor = loaded.executor
        self._kept: dict[int, tuple[PreparedPrompt, LayerDeltas | None]] = {}
        self._deltas: dict[int, LayerDeltas] = {}
        self._prompts: dict[int, PromptDeltas] = {}

    def serve(self, tasks: _Inbox) -> None:
        """Do what the head asks for, for ever."""
        if self._loaded.coder is not None:
            threading.Thread(
                target=self._code, args=(tasks.coding,), name="coding", daemon=True
            ).start()
        self._send(*self._up())
        while True:
            self._answer(*tasks.steps.get(), self._stepped)

    def _up(self) -> tuple[Up, tuple[Bytes, ...]]:
        executor, coder = self._executor, self._loaded.coder
        tokenizers = () if coder is None else coder.encoder.tokenizers
        up = Up(
            self._number,
            _FORMATS[executor.dtype],
            device_name(executor.device),
            "" if coder is None else coder.memory.explanation,
            tuple(one.max_tokens for one in tokenizers),
        )
        return up, tuple(_as_frame(one.content) for one in tokenizers)

    def _code(self, tasks: SimpleQueue[tuple[object, Sequence[Bytes]]]) -> None:
        with torch.inference_mode():
            while True:
                self._answer(*tasks.get(), self._coded)

    def _answer(
        self,
        head: object,
        frames: Sequence[Bytes],
        work: Callable[[object, Sequence[Bytes]], Mapping[str, Tensor] | None],
    ) -> None:
        """Do what a message asks for, and answer if it is a call."""
        call = getattr(head, "call", None)
        try:
            found = work(head, frames)
        except InvalidRequest as error:
            self._refuse(call, "invalid", error.message, error.param, error.code)
        except ModelUnsupported as error:
            self._refuse(call, "unsupported", str(error))
        except Exception as error:
            # of a step: the others wait for this rank, and the head ends them all
            logger.exception("%s has failed", type(head).__name__)
            self._refuse(call, "failed", f"{type(error).__name__}: {error}")
        else:
            if call is not None and found is not None:
                reply = framed(found)
                self._send(Answer(call, self._number, reply.specs), reply.frames)

    def _refuse(
        self,
        call: int | None,
        kind: Literal["unsupported", "invalid", "failed"],
        message: str,
        param: str | None = None,
        code: str = "",
    ) -> None:
        number = -1 if call is None else call
        self._send(Refusal(number, self._number, kind, message, param, code))

    def _stepped(self, head: object, frames: Sequence[Bytes]) -> Mapping[str, Tensor] | None:
        match head:
            case Keep(key, deltas, specs):
                own = None if deltas is None else self._deltas[deltas]
                device = self._executor.device
                tensors = {k: v.to(device) for k, v in tensors_of(specs, frames).items()}
                prepared = self._executor.prepare(Conditioning.of(tensors), own)
                self._kept[key] = (prepared, own)
            case Forget(key):
                self._kept.pop(key, None)
            case Bind(_, number):
                self._deltas[number] = self._executor.bind(self._products(frames[0]))
                return {}
            case Unbind(number):
                self._deltas.pop(number, None)
            case SetStep():
                return self._step(head, frames)
        return None

    def _step(self, head: SetStep, frames: Sequence[Bytes]) -> Mapping[str, Tensor] | None:
        (latents,) = tensors_of([head.latents], frames).values()
        prepared, deltas = self._kept[head.key]
        device = self._executor.device
        composition, _ = composition_of([(head.height, head.width, len(prepared.tokens) == 2)])
        batch = StepBatch(
            layout=layout_of(composition, self._executor.num_levels),
            latents=latents.to(device),
            timesteps=torch.tensor([head.timestep], device=device),
            prepared=(prepared,),
            guidance_scales=torch.tensor([head.guidance_scale], device=device),
            deltas=() if deltas is None else (deltas,),
        )
        ranks = range(head.first, head.first + head.degree)
        prediction = self._executor.predict(batch, ranks, head.rows)
        return None if prediction is None else {"prediction": prediction}

    def _products(self, frame: Bytes) -> dict[str, LowRank]:
        """Return the products of a frame, by their paths."""
        executor = self._executor
        tensors = load_tensors(frame.tobytes())
        layers = {}
        for name in [one for one in tensors if one.endswith(":shrink")]:
            path = name.removesuffix(":shrink")
            stride, padding = tensors[f"{path}:window"].view(2, 2).tolist()
            one = LowRank(tensors[name], tensors[f"{path}:expand"], tuple(stride), tuple(padding))
            layers[path] = one.to(executor.device, executor.dtype)
        return packed(layers)

    def _coded(self, head: object, frames: Sequence[Bytes]) -> Mapping[str, Tensor] | None:
        coder = self._loaded.coder
        assert coder is not None, "only the rank that codes is asked to"
        match head:
            case Bind(_, number):
                by_encoder: dict[str, dict[str, LowRank]] = {}
                for path, one in self._products(frames[0]).items():
                    encoder, _, inner = path.partition(":")
                    by_encoder.setdefault(encoder, {})[inner] = one
                self._prompts[number] = coder.encoder.bind(by_encoder)
                return {}
            case Unbind(number):
                self._prompts.pop(number, None)
            case Encode(_, deltas):
                requests = REQUESTS.decode(frames[0].tobytes())
                own = [None if one is None else self._prompts[one] for one in deltas]
                found = coder.encoder.encode(requests, own)
                return {
                    f"{index}.{name}": tensor
                    for index, one in enumerate(found)
                    for name, tensor in one.tensors().items()
                }
            case EncodeImages(_, specs):
                images = [one.numpy() for one in tensors_of(specs, frames).values()]
                return _numbered(coder.images.encode(images))
            case Decode(_, specs):
                latents = list(tensors_of(specs, frames).values())
                return _numbered([torch.from_numpy(one) for one in coder.decoder.decode(latents)])
        return None

    def _send(self, head: FromRank, frames: Sequence[Bytes] = ()) -> None:
        try:
            self._link.send(FROM_RANK.encode(head), frames)
        except LinkClosed:
            # the reading thread ends the process
            threading.Event().wait()


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(index): one for index, one in enumerate(tensors)}


def _as_frame(content: bytes) -> Bytes:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).numpy()


def main() -> None:
    """Run a rank that standard input says the start of, as bytes."""
    from ray_cluster.protocol.groups import GROUP_START

    run_rank(GROUP_START.decode(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
