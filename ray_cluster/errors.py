"""The one error hierarchy of ray-cluster.

Every message says what was given, what is allowed and what to change. The tree::

    RayClusterError
    ├── ConfigError              the configuration cannot be used
    ├── ModelUnsupported         a model folder holds something the engine does not cover
    ├── MemoryRefused            the memory plan has no room for the model
    ├── InvalidRequest           a request parameter is wrong (names the parameter)
    ├── RequestFailed            one request failed while it was worked on (names the stage)
    ├── DeviceBroken             the accelerator is lost to this process (ends the engine)
    └── Unavailable              the service can't do it just now
        ├── DispatcherUnavailable    the dispatcher is starting, dead or unreachable
        └── JobStoreUnavailable      the dispatcher cannot read or write its jobs

Infeasibility (a full queue, a missed deadline) is never an exception: it is a field of
:class:`ray_cluster.policies.types.Offer`.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

LastStage = Literal["upscale"]
"""What may be done with a finished image: the kind of its workers, and the call's field for it."""
LAST_STAGES: tuple[LastStage, ...] = get_args(LastStage)

Stage = Literal[
    "queue",
    "input",
    "lora",
    "control",
    "image",
    "encode",
    "denoise",
    "decode",
    "coding",
    "storing",
    "score",
    LastStage,
    "replica",
]


class RayClusterError(Exception):
    """Base of all errors that ray-cluster raises on purpose."""


class ConfigError(RayClusterError):
    """The configuration cannot be used; the message names the key."""


class ModelUnsupported(RayClusterError):
    """The model needs something that the engine does not cover, named in the message."""


class MemoryRefused(RayClusterError):
    """The memory plan found no way to run the model on the device."""


class InvalidRequest(RayClusterError):
    """A request parameter is wrong.

    Args:
        message: what was given, what is allowed, what to change.
        param: name of the parameter as the API spells it.
        code: short machine-readable reason.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class RequestFailed(RayClusterError):
    """One request failed while it was worked on; other requests are not affected.

    Args:
        message: what happened.
        stage: where it happened.
    """

    def __init__(self, message: str, stage: Stage = "denoise") -> None:
        super().__init__(message, stage)
        self.message = message
        self.stage: Stage = stage

    def __str__(self) -> str:
        return f"{self.stage}: {self.message}"


class DeviceBroken(RayClusterError):
    """Every call on the accelerator fails until the process ends; no single request is at fault."""


class Unavailable(RayClusterError):
    """A part of the service that the call needs is unavailable; the call itself is right."""


class DispatcherUnavailable(Unavailable):
    """The dispatcher did not answer just now: it is starting, dead or unreachable."""


class JobStoreUnavailable(Unavailable):
    """The dispatcher cannot read or write its jobs just now.

    No job was made. A job that was to be cancelled is, and is written so when that is possible.
    """


MODEL_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model, a tokenizer or a codec may raise on one request's data without the process being
broken: such an error fails that request. Anything else ends the engine's thread, and with it the
replica; outside of the engine, it ends the request (:mod:`ray_cluster.replica.unexpected`)."""

REQUEST_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, InvalidRequest)
"""What ends one request in a stage: an error on its data, or a parameter found wrong only there."""


def has_password(url: str) -> bool:
    """Whether a URL names a password, or has a query that may hold one."""
    plain, *query = re.split("[?#]", url.partition("://")[2], maxsplit=1)
    user = plain.rpartition("@")[0]
    return ":" in user or any(re.search("(?i)pass|secret|token|key", one) for one in query)


def without_password(value: object) -> str:
    """Return a value as it may be shown: a URL without user, password, query and fragment."""
    text = str(value)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    plain, *query = re.split("[?#]", rest, maxsplit=1)
    user, at, place = plain.rpartition("@")
    return f"{scheme}{mark}{'...' if user else ''}{at}{place}{'?...' if query else ''}"
