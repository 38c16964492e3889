"""The real reason in what Serve says of an application that does not start."""

from __future__ import annotations

import re

_OURS = re.compile(r"ray_cluster\.errors\.\w+: (.+)")
_ANY_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$", re.MULTILINE)


def own_error(message: str) -> str | None:
    """Return the message of the last error of ours in a traceback: trying again changes nothing."""
    found = _OURS.findall(message)
    return str(found[-1]).strip() if found else None


def short_reason(message: str) -> str:
    """Return the one line of a traceback that tells most."""
    own = own_error(message)
    if own is not None:
        return own
    errors = _ANY_ERROR.findall(message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return str(errors[-1]) if errors else (lines[-1] if lines else "no reason given")
