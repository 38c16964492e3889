"""Jobs as rows of a table, and rows as jobs, also those that other releases have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ray_cluster.codec.values import VERSION, CodecError, TextCodec, is_versioned, plain_of
from ray_cluster.protocol.jobs import JOB_STATES, Job, StoredImage
from ray_cluster.protocol.outcomes import Deferred
from ray_cluster.requests import Failure, ImageRequest

T = TypeVar("T")

# what a text that nobody has thought of may raise when it is read
UNREADABLE = (CodecError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)

# as the migrations leave them
JOB_COLUMNS = (
    "job_id",
    "client",
    "idempotency_key",
    "body_digest",
    "state",
    "slo_s",
    "created_s",
    "finished_s",
    "attempts",
    "requests",
    "images",
    "error",
    "deferred",
)
_REQUESTS: TextCodec[tuple[ImageRequest, ...]] = TextCodec(tuple[ImageRequest, ...])
_IMAGES: TextCodec[tuple[StoredImage | None, ...]] = TextCodec(tuple[StoredImage | None, ...])
_DEFERRED: TextCodec[tuple[Deferred, ...]] = TextCodec(tuple[Deferred, ...])
_ERROR: TextCodec[Failure | None] = TextCodec(Failure | None)


def row_of(job: Job) -> dict[str, Any]:
    """Return a new job's row."""
    return {
        "job_id": job.job_id,
        "client": job.client,
        "idempotency_key": job.idempotency_key,
        "body_digest": job.body_digest,
        "slo_s": job.slo_s,
        "created_s": job.created_s,
        "requests": _REQUESTS.encode(job.requests),
        **changes_of(job),
    }


def changes_of(job: Job) -> dict[str, Any]:
    """Return what of a row changes while the job lives."""
    return {
        "state": job.state,
        "finished_s": job.finished_s,
        "attempts": job.attempts,
        "images": _IMAGES.encode(job.images),
        "error": _ERROR.encode(job.error),
        "deferred": _DEFERRED.encode(job.deferred) if job.deferred else None,
    }


def job_of(row: Mapping[str, Any]) -> Job:
    """Return a row's job; raises CodecError if this release cannot read it."""
    if row["state"] not in JOB_STATES:
        raise CodecError(f"the state {row['state']!r} is none of {', '.join(JOB_STATES)}")
    deferred = row["deferred"]
    read = {
        "requests": _stored(_REQUESTS, row["requests"]),
        "images": _stored(_IMAGES, row["images"]),
        "error": _stored(_ERROR, row["error"]),
        "deferred": () if deferred is None else _DEFERRED.decode(deferred),
    }
    if not read["requests"]:
        raise CodecError("the job has no images")
    return Job(**{**row, **read})


def may_be_newer(row: Mapping[str, Any]) -> bool:
    """Whether a row that cannot be read may be a later release's: it is whole as far as known."""
    texts = [row["requests"], row["images"], row["error"], row["deferred"]]
    try:
        plain = [plain_of(text) for text in texts if text is not None]
    except (CodecError, RecursionError):
        return False
    if not all(isinstance(one, dict) and one.keys() >= {"version", "value"} for one in plain):
        return False
    if any(one["version"] != VERSION for one in plain):
        return True
    requests = plain[0]["value"]
    return (
        isinstance(requests, list)
        and bool(requests)
        and all(isinstance(one, dict) and "request_id" in one for one in requests)
    )


def _stored(codec: TextCodec[T], text: str) -> T:
    """Return what a column holds, also where a version before the codec wrote it."""
    plain = plain_of(text)
    return codec.of_plain(plain["value"] if is_versioned(plain) else _renewed(plain))


def _renewed(plain: Any) -> Any:
    """Return plain values with today's fields."""
    if isinstance(plain, list):
        return [_renewed(one) for one in plain]
    if isinstance(plain, dict):
        # a request's terms say the same
        is_request = "prompt" in plain
        return {key: one for key, one in plain.items() if not is_request or key != "fewest_steps"}
    return plain
