"""Attention in the precision that the device is fastest with."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of ``[n, heads, L, d]`` to ``[n, heads, K, d]``, in the query's dtype.

    On a CPU without instructions for tiles (AMX), PyTorch's attention of half precision takes as
    long as that of float32 and more, with its conversions: there it is computed in float32, which
    is nearer to the truth besides.
    """
    dtype = query.dtype
    if dtype is torch.float32 or query.device.type != "cpu" or _has_tiles():
        return F.scaled_dot_product_attention(query, key, value)
    wide = (query.float(), key.float(), value.float())
    return F.scaled_dot_product_attention(*wide).to(dtype)


@cache
def _has_tiles() -> bool:
    return torch.cpu._is_amx_tile_supported()
