"""How long a replica tries to reach a store before an image fails for it."""

from __future__ import annotations

from ray_cluster.requests import ImageRequest

# a client waits for the reply
RETRY_S = (0.2, 1.0, 3.0)
# a job outlives the death of every process, so also a while without its store
JOB_RETRY_S = (*RETRY_S, 10.0, 30.0, 60.0, 120.0)


def retry_waits_s(request: ImageRequest) -> tuple[float, ...]:
    """Return the seconds between the tries of a request."""
    return JOB_RETRY_S if request.job_id else RETRY_S
