"""Group normalisation with SiLU, by the device that the rows are on."""

from __future__ import annotations

from ray_cluster.kernels.by_device import by_device
from ray_cluster.kernels.group_norm_silu import reference

group_norm_silu = by_device(reference.group_norm_silu)
