"""The sampler step of a whole batch, by the device that its latents are on."""

from __future__ import annotations

from ray_cluster.kernels.by_device import by_device
from ray_cluster.kernels.sampler_update import reference

sampler_update = by_device(reference.sampler_update)
