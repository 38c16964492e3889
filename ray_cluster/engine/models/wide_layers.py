"""Layers that compute in float32 with weights of 16 bits, on CPUs without instructions for these.

There PyTorch computes half precision without oneDNN: it unfolds the windows of a convolution into a
matrix, nine times as large as the images; its products are slow, too. (Measured with AVX2:
linear layers and convolutions take five times as long as in float32.) So the weights stay as small
as they are, and each layer widens its own while it runs. All else is float32, which is nearer to
the truth besides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU computes in a format about as fast as in float32, or faster.

    It is what PyTorch asks before it hands half precision to oneDNN, and heeds oneDNN's own limit
    (``ONEDNN_MAX_CPU_ISA``).
    """
    if dtype is torch.float32:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the format that layers with weights of a format compute in on a device."""
    return torch.float32 if device.type == "cpu" and not has_instructions(dtype) else dtype


def widen(model: Any, device: torch.device) -> torch.dtype:
    """Have a model's layers compute in the format that suits a device; return that format.

    Where it is not the weights' own, layers take any format and return float32. Small parameters
    of other modules are converted.

    Args:
        model: of diffusers or transformers; its own ``dtype`` stays that of its weights.
        device: where the model computes.
    """
    dtype: torch.dtype = model.dtype
    computes = computing_dtype(dtype, device)
    if computes is not dtype:
        for part in model.modules():
            if (kind := _WIDE.get(type(part))) is not None:
                part.__class__ = kind
            elif hasattr(part, "compute_dtype"):
                # of quantised weights
                part.compute_dtype = computes
            elif not isinstance(part, tuple(_WIDE.values())):
                _convert(part)
    return computes


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _convert(part: nn.Module) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        if parameter.is_floating_point():
            # not through its data: fake tensors refuse those of another format
            wide = nn.Parameter(parameter.detach().float(), requires_grad=False)
            part.register_parameter(name, wide)


class _WideLinear(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows.float(), self.weight.float(), _float(self.bias))


class _WideConv2d(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        images, weight = images.float(), self.weight.float()
        outputs: Tensor = self._conv_forward(images, weight, _float(self.bias))
        return outputs


class _WideGroupNorm(nn.GroupNorm):
    def forward(self, images: Tensor) -> Tensor:
        weight, bias = _float(self.weight), _float(self.bias)
        return F.group_norm(images.float(), self.num_groups, weight, bias, self.eps)


class _WideLayerNorm(nn.LayerNorm):
    def forward(self, rows: Tensor) -> Tensor:
        weight, bias = _float(self.weight), _float(self.bias)
        return F.layer_norm(rows.float(), self.normalized_shape, weight, bias, self.eps)


class _WideEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


_WIDE: dict[type[Any], type[nn.Module]] = {
    nn.Linear: _WideLinear,
    nn.Conv2d: _WideConv2d,
    nn.GroupNorm: _WideGroupNorm,
    nn.LayerNorm: _WideLayerNorm,
    nn.Embedding: _WideEmbedding,
}
