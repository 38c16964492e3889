"""Brings a loaded pipeline's weights to where its plan wants them.

What is offloaded stays in the machine's memory, and each layer is copied when it runs (accelerate's
hooks on every layer). diffusers' group offload would copy the next layer meanwhile, but it learns
the order of layers in the model's own ``forward``, which executors never call: its hooks would note
every call for ever and prefetch nothing. The copies are from pageable memory: torch's pinned memory
takes the next power of two of each weight, for FLUX 1.7 times the model.
"""

from __future__ import annotations

from typing import Any

import torch

from ray_cluster.engine.files.weights import is_text_encoder
from ray_cluster.engine.stages.autoencoder import in_decoders_format
from ray_cluster.policies.costs.memory import Offloaded


def place_weights(pipeline: Any, device: torch.device, offloaded: Offloaded) -> None:
    """Bring a pipeline's models to a device, except those that rest in the machine's memory."""
    from accelerate import cpu_offload

    # the hooks keep weights in the format that they find
    in_decoders_format(pipeline.vae, device)
    for name, component in pipeline.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        if offloaded == "all" or (offloaded == "text encoders" and is_text_encoder(name)):
            cpu_offload(component, execution_device=device, offload_buffers=True)
        else:
            component.to(device)
