"""Attention of packed sequences, each to itself: by length, or all in one variable-length call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ray_cluster.engine.batch.spans import Spans
from ray_cluster.engine.models.attend import attend

Attend = Callable[[Tensor, Tensor, Tensor, Spans, Spans], Tensor]
"""From queries ``[N, heads, d]``, keys and values ``[M, heads, d]``, and where each sequence's
queries and its keys are, to ``[N, heads * d]``."""

# what the kernel behind PyTorch's variable-length attention asks for
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_FIRST_CAPABILITY = (8, 0)


AttentionKind = Literal["by length", "at once"]


def attention_for(device: torch.device, dtype: torch.dtype) -> AttentionKind:
    """Return the attention that a device is taken to be fastest with."""
    return "at once" if has_variable_length(device, dtype) else "by length"


def start_attention(kind: AttentionKind) -> Attend:
    """Return the attention for one step."""
    return AttendAtOnce() if kind == "at once" else attend_by_length


def attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, key_spans: Spans
) -> Tensor:
    """Attend in one call per length, over views."""
    attended = []
    for span, theirs in zip(spans, key_spans, strict=True):
        queries = span.of(query).transpose(1, 2)
        keys, values = (theirs.of(rows).transpose(1, 2) for rows in (key, value))
        images = attend(queries, keys, values)
        attended.append(images.transpose(1, 2).flatten(2).flatten(0, 1))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


class AttendAtOnce:
    """Attends in one variable-length call for all sequences; an object is for one step.

    Where the sequences end is found out in the first layer and kept for the others. It is written
    by the device: a copy from the host would make every layer wait, and has no place in a CUDA
    graph.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[Spans, Tensor]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, key_spans: Spans
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        ends, key_ends = (self._ends_of(one, query.device) for one in (spans, key_spans))
        longest, longest_key = (max(span.length for span in one) for one in (spans, key_spans))
        rows = (query.contiguous(), key.contiguous(), value.contiguous())
        attended = varlen_attn(*rows, ends, key_ends, longest, longest_key)
        assert isinstance(attended, Tensor)
        return attended.flatten(1)

    def _ends_of(self, spans: Spans, device: torch.device) -> Tensor:
        for known, ends in self._ends:
            if known is spans:
                return ends
        self._ends.append((spans, ends_of(spans, device)))
        return self._ends[-1][1]


def ends_of(spans: Spans, device: torch.device) -> Tensor:
    """Return where every sequence begins and the last one ends, ``[sequences + 1]`` int32."""
    parts = [
        torch.arange(span.rows.start, span.rows.stop, span.length, dtype=torch.int32, device=device)
        for span in spans
    ]
    last = torch.full((1,), spans[-1].rows.stop, dtype=torch.int32, device=device)
    return torch.cat([*parts, last])


def has_variable_length(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has variable-length attention for a device and dtype."""
    if device.type != "cuda" or dtype not in _HALF_DTYPES:
        return False
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
