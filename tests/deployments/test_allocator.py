"""What torch's allocator reads is set before torch is there, and what a node says is left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# a replica's constructor, with stand-ins for what needs Ray; the builder is what imports torch
SCRIPT = """
import asyncio, sys, types
from ray_cluster.deployments import base_model

async def first_settings(*_): pass

def build_denoiser(*_, **__):
    import torch
    print("settings", torch._C._accelerator_getAllocatorSettings())
    sys.exit()

builder = types.ModuleType("ray_cluster.replica.denoise.builder")
builder.build_denoiser, base_model.first_settings = build_denoiser, first_settings
sys.modules["ray_cluster.replica.denoise.builder"] = builder
anything = types.SimpleNamespace
nothing = lambda *_, **__: anything(link=None, replica_id=anything(unique_id="r"))
base_model.set_up_actor_logs = base_model.refuse_local_storage = nothing
base_model.DispatcherHandle = base_model.ImageCoder = nothing
base_model.serve = anything(get_replica_context=nothing)
base_model.get_node_ip_address = nothing
arguments = anything(logs=None, storage=None, patience_s=1, pool=anything(name="p"))
print("torch" in sys.modules)
asyncio.run(base_model.BaseModel.__init__(anything(), arguments))
"""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_replica_has_segments_that_grow_unless_its_node_says_otherwise(given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    if given is not None:
        environment[given] = "max_split_size_mb:64"
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    expected = "expandable_segments:True" if given is None else "max_split_size_mb:64"
    assert answer.stdout.splitlines() == ["False", f"settings {expected}"], answer.stderr
