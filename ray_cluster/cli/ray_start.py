"""Imports Ray with the environment that a service's Ray has, and only where a command needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ray_cluster.config.sections import RayConfig
from ray_cluster.deployments.ray_environment import apply_ray_environment

if TYPE_CHECKING:
    from ray_cluster.cli.running_cell import RunningCell


@contextmanager
def connected_quietly(address: str | None) -> Iterator[RunningCell]:
    """Connect to a running service; see :func:`ray_cluster.cli.running_cell.connected`."""
    # before Ray is imported: it asks for its token unless the environment says otherwise
    apply_ray_environment(RayConfig())
    from ray_cluster.cli.running_cell import connected

    with connected(address) as cell:
        yield cell
