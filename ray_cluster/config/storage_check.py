"""Whether what outlives processes is where every process of the cell finds it."""

from __future__ import annotations

from ray_cluster.config.sections import BLOB_FOLDERS, StorageArguments
from ray_cluster.errors import ConfigError


def check_storage(config: StorageArguments, num_nodes: int) -> None:
    """Refuse files of one node as the storage of a cell on several.

    A dispatcher that comes up on another node would find no jobs, and images of jobs that were made
    there, finished or not, would be found by nobody.

    Args:
        num_nodes: nodes of the Ray cluster that live.

    Raises:
        ConfigError: names the keys, and what to set.
    """
    places = {key: getattr(config, key) for key in ("jobs", *BLOB_FOLDERS)}
    local = [f"storage.{key} ({value})" for key, value in places.items() if _is_local(value)]
    if num_nodes <= 1 or config.is_shared or not local:
        return
    raise ConfigError(
        f"the Ray cluster has {num_nodes} nodes, but {' and '.join(local)} would be on the disk of "
        "one of them. Set storage.jobs to 'postgresql://user:password@host/database', and "
        "storage.results, storage.states and storage.inputs to an object store "
        "('s3://bucket/folder'); or, if these paths are on a disk that all nodes share and that "
        "outlives each of them, set storage.is_shared: true"
    )


def _is_local(place: str) -> bool:
    scheme, mark, _ = place.partition("://")
    return not mark or scheme in {"sqlite", "file", "local"}
