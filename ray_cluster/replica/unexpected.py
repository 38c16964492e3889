"""What nobody expected, met in the work of one request: it ends that request, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray_cluster.errors import InvalidRequest, RequestFailed, Stage
from ray_cluster.observability.logs import bound, fields_of, without_prompts
from ray_cluster.requests import Failure, ImageRequest

logger = logging.getLogger(__name__)


@contextmanager
def failing_alone(request: ImageRequest, stage: Stage = "replica") -> Iterator[None]:
    """Make every error within the block one that ends the request.

    A lease whose task had died of another error would be held for ever.

    Raises:
        RequestFailed, InvalidRequest: nothing else, unless the task itself is cancelled.
    """
    try:
        yield
    except (RequestFailed, InvalidRequest):
        raise
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        # what it has waited for was cancelled, not the task
        raise unexpected(error, request, stage) from error
    except Exception as error:
        raise unexpected(error, request, stage) from error


def unexpected(
    error: BaseException, request: ImageRequest, stage: Stage = "replica"
) -> RequestFailed:
    """Log an error with its traceback, and return what the request's client is to know of it.

    Its text may have a prompt, a place or a password in it. The client gets its kind alone.
    """
    kind = type(error).__name__
    shown = RuntimeError(without_prompts(f"{kind}: {error}", request))
    with bound(**fields_of(request)):
        logger.error(
            "the work on an image has failed unexpectedly",
            exc_info=shown.with_traceback(error.__traceback__),
        )
    return RequestFailed(f"an unexpected {kind}; the replica's log tells more", stage)


def failure_of(request_id: str, error: RequestFailed | InvalidRequest) -> Failure:
    """Return an error as the client sees it."""
    if isinstance(error, InvalidRequest):
        return Failure(request_id, "invalid", error.message, "encode", error.param, code=error.code)
    return Failure(request_id, "error", error.message, error.stage)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
