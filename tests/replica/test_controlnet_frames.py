"""Tensors of every format come back in every bit."""

from __future__ import annotations

import pytest
import torch

from ray_cluster.protocol.controlnets import FrameSpec
from ray_cluster.replica.frames import framed, tensors_of

FORMATS = ("float32", "float16", "bfloat16", "float64", "uint8", "int32", "int64")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)])
def test_a_tensor_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    # any bits, those of NaNs too
    tensor = torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)
    sent = framed({"one": tensor, "turned": tensor.T if tensor.ndim == 2 else tensor})
    back = tensors_of(sent.specs, sent.frames)
    assert [one.dtype for one in sent.frames] == ["uint8", "uint8"]
    assert list(back) == ["one", "turned"]
    assert back["one"].shape == tensor.shape
    assert back["one"].dtype == dtype
    flat = [one.flatten().view(torch.uint8) for one in (back["one"], tensor)]
    assert torch.equal(*flat)
    if tensor.ndim == 2:
        turned = [
            one.contiguous().flatten().view(torch.uint8) for one in (back["turned"].T, tensor)
        ]
        assert torch.equal(*turned)


@pytest.mark.parametrize(
    "spec",
    [
        FrameSpec("x", "float32", (5,)),
        FrameSpec("x", "float32", (-4, -1)),
        FrameSpec("x", "complex64", (2,)),
        FrameSpec("x", "cuda", (4,)),
    ],
    ids=str,
)
def test_what_a_spec_does_not_fit_is_refused(spec: FrameSpec) -> None:
    frame = framed({"x": torch.zeros(4)}).frames[0]
    with pytest.raises(ValueError, match="frame x"):
        tensors_of([spec], [frame])
    with pytest.raises(ValueError, match="2 frames, 1 are named"):
        tensors_of([spec], [frame, frame])
