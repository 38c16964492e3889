"""The Gateway deployment: HTTP in, dispatcher calls out. Keeps no queue and no state.

Duties: build the HTTP application around a dispatcher handle when the replica starts; follow the
settings; pass its metrics on to Ray.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve

from ray_cluster.api.access.call_metrics import GatewayMetrics
from ray_cluster.api.app import Surroundings, create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.settings import CurrentSettings, SettingsFeed
from ray_cluster.config.slices import FrontArguments
from ray_cluster.deployments.actors import (
    NodeWatch,
    RayMetrics,
    refuse_local_storage,
    set_up_actor_logs,
)
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.serve.early_body import EarlyBodyReader
from ray_cluster.imaging.detectors import Detectors
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore


@serve.ingress()
class Gateway:
    """Serves the HTTP application of :func:`ray_cluster.api.app.create_app`."""

    def __init__(self, arguments: FrontArguments, _dispatcher: object) -> None:
        self._arguments = arguments
        set_up_actor_logs(arguments.logs)
        refuse_local_storage(arguments.storage)
        self._metrics = GatewayMetrics()
        self._ray_metrics = RayMetrics(self._snapshot)
        # Serve calls the constructor on the event loop
        self._ray_metrics.start()
        self._nodes = NodeWatch(arguments.storage)
        self._nodes.start()
        self._client = DispatcherHandle(patience_s=arguments.dispatch.patience_s).client
        self._settings = CurrentSettings()
        self._feed = SettingsFeed(self._client, self._settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Serve calls this after the constructor."""
        storage = self._arguments.storage
        app = create_app(
            self._client,
            self._settings,
            results=BlobStore(storage.results),
            images=SentImages(
                InputStore.open(storage.inputs, grace_s=storage.inputs_grace_s),
                ImageCoder(),
                Detectors(self._arguments.preprocessors.folder or ""),
            ),
            around=Surroundings(
                request_id_writer="proxy",
                own_metrics=self._metrics,
                warnings=self._nodes.warnings,
                feed=self._feed,
            ),
        )
        app.add_middleware(EarlyBodyReader)
        return app

    async def check_health(self) -> None:
        """Raise when the settings are not followed any more, so that Serve replaces it."""
        self._feed.check_alive()

    async def _snapshot(self) -> Snapshot:
        return self._metrics.snapshot()
