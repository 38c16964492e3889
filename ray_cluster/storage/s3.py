"""How s3 is called, so that no call waits for ever."""

from __future__ import annotations

from typing import Any

# after which a server is silent
SILENCE_S = 15.0
# of a call, by each of s3fs and botocore; by default they go on for minutes
TRIES = 2


def s3_options() -> dict[str, Any]:
    """Return the options of s3fs.

    Raises:
        ImportError: it is not installed.
    """
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession()
    # aiohttp has no bound for a server that does not ask for the announced body
    session.unregister("before-call.s3", add_expect_header)
    return {
        "session": session,
        "config_kwargs": {
            "connect_timeout": SILENCE_S,
            "read_timeout": SILENCE_S,
            "retries": {"total_max_attempts": TRIES},
        },
    }


def lacks_credentials(error: BaseException | None) -> bool:
    """Whether a call was not made, as the process has no credentials."""
    # without s3fs there is no such class
    return type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError"}
