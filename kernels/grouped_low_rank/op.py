"""Low-rank products of groups of rows, by the device that they are on."""

from __future__ import annotations

from ray_cluster.kernels.by_device import by_device
from ray_cluster.kernels.grouped_low_rank import reference

grouped_low_rank = by_device(reference.grouped_low_rank)
