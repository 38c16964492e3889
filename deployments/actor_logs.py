"""Sends our records into the log file that Ray Serve has opened for this replica."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler

from ray import serve
from ray.serve.schema import LoggingConfig

from ray_cluster.config.sections import LogsConfig
from ray_cluster.observability.logs import set_up_logs

# while a request waits for nothing but its image
_DELAY_S = 0.05


def serve_logging(config: LogsConfig) -> LoggingConfig:
    """Return what makes Serve's own lines fit to ours in the same file."""
    return LoggingConfig(
        encoding=config.format.upper(),
        log_level=config.level.upper(),
        # a line per call of the dispatcher costs more than the call
        enable_access_log=False,
    )


def set_up_actor_logs(config: LogsConfig) -> None:
    """Have this replica's lines written to its file; to standard error if Serve has no file."""
    context = serve.get_replica_context()
    # the file alone, without the filters in front of it that put Ray's values into records
    files: list[logging.Handler] = [
        handler.target
        for handler in logging.getLogger("ray.serve").handlers
        if isinstance(handler, MemoryHandler) and handler.target is not None
    ]
    set_up_logs(
        config,
        files or [logging.StreamHandler()],
        process={
            "application": context.app_name,
            "deployment": context.deployment,
            "process_id": context.replica_id.unique_id,
        },
        delay_s=_DELAY_S,
    )
