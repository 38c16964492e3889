"""Where downloaded models are kept, and whether they may be downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from ray_cluster.cli.checks.finding import Finding, ok, warning
from ray_cluster.cli.checks.machine import is_writable, nearest_existing

_GIB = 2**30
# SDXL in half precision takes 7 GB
_ENOUGH_BYTES = 10 * _GIB


def check_model_cache() -> Iterator[Finding]:
    """Yield what there is to say of Hugging Face's cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    folder = nearest_existing(cache)
    free = shutil.disk_usage(folder).free
    mode = "offline" if constants.HF_HUB_OFFLINE else "downloads allowed"
    found = f"{cache}, {free / _GIB:.1f} GiB free, {mode}"
    if not is_writable(folder):
        yield warning(
            "model cache", f"{found}, not writable", "set HF_HOME to a folder of your own"
        )
    elif free < _ENOUGH_BYTES:
        yield warning("model cache", found, "large models will not fit; set HF_HOME elsewhere")
    else:
        yield ok("model cache", found)
