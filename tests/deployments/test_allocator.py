"""What torch's allocator reads is set before torch is there, and what a node says is left alone."""

from __future__ import annotations

import os
import subprocess
import sys

# a replica's constructor, with stand-ins for what needs Ray; the builder is what imports torch
SCRIPT = """
import asyncio, os, sys, tempfile, types
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.deployments import worker

async def first_settings(*_): pass

def build(*_):
    import torch
    print("settings", torch._C._accelerator_getAllocatorSettings())
    sys.exit()

builder = types.ModuleType("ray_cluster.replica.denoise.builder")
builder.build, worker.first_settings = build, first_settings
sys.modules["ray_cluster.replica.denoise.builder"] = builder
anything = types.SimpleNamespace
nothing = lambda *_, **__: anything(link=None, replica_id=anything(unique_id="r"))
worker.set_up_actor_logs = worker.refuse_local_storage = nothing
worker.DispatcherHandle = worker.ImageCoder = nothing
worker.serve = anything(get_replica_context=nothing)
worker.get_node_ip_address = nothing
folder = tempfile.TemporaryDirectory()
context = anything(get_temp_dir=lambda: folder.name, get_session_name=lambda: "session")
# asked for its own, Ray would start
worker.ray = anything(get_runtime_context=lambda: context)
arguments = anything(
    kind="denoise",
    name="p",
    logs=None,
    storage=None,
    dispatch=anything(patience_s=1),
    is_group=False,
    pools=[PoolConfig(name="p", model="shapes-sd")],
)
# torch reads its environment once: a process for each, which has all but torch from this one
for given in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.environ.update({given: "max_split_size_mb:64"} if given != "nothing" else {})
        print("torch" in sys.modules)
        asyncio.run(worker.WorkerDeployment.__init__(anything(), arguments))
    os.waitpid(child, 0)
"""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def test_a_replica_has_segments_that_grow_unless_its_node_says_otherwise() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, "nothing", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    expected = ("expandable_segments:True", "max_split_size_mb:64", "max_split_size_mb:64")
    lines = [line for one in expected for line in ("False", f"settings {one}")]
    assert answer.stdout.splitlines() == lines, answer.stderr
