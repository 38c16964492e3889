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
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)

    def running(self) -> AbstractContextManager[object]:
        """Have all that the calling thread queues meanwhile go to this stream."""
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait until all that is queued is done: before tensors go to another stage.

        The thread sleeps meanwhile. A stream's own wait would spin, on a core that other stages and
        replicas need.
        """
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors of other streams until what is queued here is done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)


def finish_copies(device: torch.device) -> None:
    """Wait for what the calling thread has queued outside of any stage, such as a state's copies.

    A copy from the host's pageable memory may be under way when its call returns.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
