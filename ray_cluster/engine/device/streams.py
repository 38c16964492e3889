"""Streams of an accelerator: one for each stage, so that none waits for what another has queued."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

# lower numbers go first; streams of the usual priority have 0
_URGENT = -1


class StageStream:
    """Where the thread of a stage queues its work; on a CPU nothing is queued, and nothing happens.

    Args:
        is_urgent: whether its work goes before that of other streams.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)
            self._done = torch.cuda.Event(blocking=True)

    def running(self) -> AbstractContextManager[object]:
        """Have all that the calling thread queues meanwhile go to this stream."""
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait until all that is queued is done: before tensors go to another stage.

        The thread sleeps meanwhile. Synchronising a stream would have it poll: that takes a core
        from the other stages.
        """
        if self._stream is not None and self._done is not None:
            self._done.record(self._stream)
            self._done.synchronize()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors of other streams until what is queued here is done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)


def finish_queued(device: torch.device) -> None:
    """Wait until all that the calling thread has queued is done, asleep meanwhile."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for what is queued there.

    A copy from pageable memory waits for everything before it.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
