"""A replica on a GPU is held to its share before it loads; torch.cuda's calls are faked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ray_cluster.engine.device.gpu import number_format_here, worker_device
from ray_cluster.engine.models import loading
from ray_cluster.engine.stages.autoencoder import in_decoders_format
from ray_cluster.policies.costs.gpu_shares import CUDA_CONTEXT_BYTES
from tests.engine.conftest import Zoo
from tests.engine.harness import load, pool

GIB = 2**30


class Loading(Exception):
    """The weights are about to be read."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is asked of a GPU of 24 GiB, in its order; loading ends with its first weight."""
    found: list[Any] = []

    def begin(_folder: Any, dtype: torch.dtype) -> None:
        found.append(("load", dtype))
        raise Loading

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        cuda, "set_per_process_memory_fraction", lambda part: found.append(("fraction", part))
    )
    monkeypatch.setattr(loading, "_load_pipeline", begin)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield found
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("share", "limit_gib"), [({"num_gpus": 0.5}, 12), ({"num_gpus": 0.5, "memory_gib": 9}, 9)]
)
def test_a_replica_is_held_to_its_share_before_it_loads(
    zoo: Zoo, calls: list[Any], share: dict[str, float], limit_gib: int
) -> None:
    with pytest.raises(Loading):
        load(pool(zoo.folder("sdxl"), device="cuda", **share))
    fraction = (limit_gib * GIB - CUDA_CONTEXT_BYTES) / (24 * GIB)
    assert calls == [("fraction", pytest.approx(fraction)), ("load", torch.float16)]


def test_a_device_has_the_name_that_its_tensors_say(zoo: Zoo, calls: list[Any]) -> None:
    folder = zoo.folder("sdxl")
    assert worker_device(pool(folder, device="cuda", num_gpus=1)) == torch.device("cuda:1")
    assert worker_device(pool(folder)) == torch.zeros(1).device


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_float32_is_exact_and_what_half_precision_leaves_in_it_takes_tf32(
    zoo: Zoo, calls: list[Any], dtype: Any
) -> None:
    given = pool(zoo.folder("sdxl"), device="cuda", num_gpus=1, dtype=dtype)
    with pytest.raises(Loading):
        load(given)
    assert number_format_here(given) == (dtype or "float16")
    takes_tf32 = dtype != "float32"
    assert torch.backends.cuda.matmul.allow_tf32 == takes_tf32
    assert torch.backends.cudnn.allow_tf32 == takes_tf32


def test_a_model_on_a_cpu_asks_nothing_of_a_gpu(zoo: Zoo, calls: list[Any]) -> None:
    given = pool(zoo.folder("sdxl"))
    with pytest.raises(Loading):
        load(given)
    assert calls == [("load", torch.float32)]
    assert number_format_here(given) == "float32"


def test_what_the_executor_replaces_is_given_back_to_the_gpu(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    build = loading.build_executor

    def build_executor(*arguments: Any, **options: Any) -> Any:
        order.append("weights in another order")
        return build(*arguments, **options)

    monkeypatch.setattr(loading, "build_executor", build_executor)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))
    load(pool(zoo.folder("sdxl")))
    assert order == ["weights in another order", "given back"]


@pytest.mark.parametrize(
    ("device", "dtype", "is_last"),
    [
        ("cpu", torch.float32, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float16, True),
        ("cuda", torch.bfloat16, True),
    ],
)
def test_convolutions_of_16_bits_take_channels_last_on_a_gpu(
    device: str, dtype: torch.dtype, is_last: bool
) -> None:
    vae = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.GroupNorm(2, 8)).to(dtype)
    before = vae[0].weight.detach().clone()
    [weight, *_] = in_decoders_format(vae, torch.device(device)).parameters()
    assert weight.is_contiguous(memory_format=torch.channels_last) == is_last
    assert torch.equal(weight, before)
