"""What may be resident on a replica: adapters and templates that need no fetching there.

ControlNets are not among them: they run in replicas of their own.
"""

from __future__ import annotations

# later requests that may be leased before one, because what it needs is on another replica
MOST_PASSES = 4


def lora_resident(name: str) -> str:
    """Return the resident id of a LoRA."""
    return f"lora:{name}"


def template_resident(sha256: str) -> str:
    """Return the resident id of an edit's template, whose activations are cached."""
    return f"template:{sha256}"
