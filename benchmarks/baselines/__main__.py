"""Runs a baseline until SIGTERM: ``python -m benchmarks.baselines settings.json``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.baselines.settings import BaselineSettings
from ray_cluster.cli.service.signals import StopSignals


def main() -> int:
    """Serve; returns the exit status."""
    settings = BaselineSettings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # before ray and torch are imported; Ray's workers inherit it. At Ray's own niceness of 15 any
    # other busy process starves them: the service's workers have the same niceness
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    with StopSignals() as signals:
        _serve(settings, signals)
    return 0


def _serve(settings: BaselineSettings, signals: StopSignals) -> None:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from benchmarks.baselines.app import bind
    from ray_cluster.deployments.service import start_ray

    try:
        start_ray(settings.ray)
        with suppress(KeyboardInterrupt):
            signals.arm()
            serve.start(http_options=HTTPOptions(host="127.0.0.1", port=settings.http_port))
            serve.run(bind(settings), name="baseline", route_prefix="/")
            while True:
                signal.pause()
    finally:
        signals.ignore()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
