"""The Gateway deployment: HTTP in, dispatcher calls out. Keeps no queue and no state.

Duties: build the HTTP application around a dispatcher handle when the replica starts; pass its
metrics on to Ray.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve

from ray_cluster.api.app import create_app
from ray_cluster.api.gateway_metrics import GatewayMetrics
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.deployments.actor_logs import set_up_actor_logs
from ray_cluster.deployments.early_body import EarlyBodyReader
from ray_cluster.deployments.links import DispatcherHandle
from ray_cluster.deployments.node_watch import NodeWatch, refuse_local_storage
from ray_cluster.deployments.ray_metrics import RayMetrics
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.storage.blob_store import BlobStore


@serve.ingress()
class Gateway:
    """Serves the HTTP application of :func:`ray_cluster.api.app.create_app`."""

    def __init__(self, config: ClusterConfig, _dispatcher: object) -> None:
        self._config = config
        set_up_actor_logs(config.logs)
        refuse_local_storage(config.storage)
        self._metrics = GatewayMetrics()
        self._ray_metrics = RayMetrics(self._snapshot)
        # Serve calls the constructor on the event loop
        self._ray_metrics.start()
        self._nodes = NodeWatch(config.storage)
        self._nodes.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Serve calls this after the constructor."""
        client = DispatcherHandle(patience_s=self._config.dispatch.patience_s).client
        results = BlobStore(self._config.storage.results)
        app = create_app(
            client,
            self._config,
            results=results,
            request_id_writer="proxy",
            own_metrics=self._metrics,
            warnings=self._nodes.warnings,
        )
        app.add_middleware(EarlyBodyReader)
        return app

    async def _snapshot(self) -> Snapshot:
        return self._metrics.snapshot()
