"""What Ray and Ray Serve read from the environment of their processes."""

from __future__ import annotations

from ray_cluster.config.loading import set_environment
from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.protocol.calling.rpc import MAX_MESSAGE_BYTES

_MESSAGES = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES)}
# nothing computes on an event loop of ours, so Serve's own tasks may share it: without the hops
# between threads a request is some milliseconds faster
MODEL_ENVIRONMENT = {
    **_MESSAGES,
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # with an arena for each thread, what one thread frees is not there for the others
    "MALLOC_ARENA_MAX": "2",
}
FRONT_ENVIRONMENT = {
    **MODEL_ENVIRONMENT,
    # not in replicas: a model is loaded on that loop
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # what is freed goes back at once: otherwise glibc keeps some of every image that passed, in
    # pieces, and the process grows for as long as it is busier than before
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
}
# torch reads it when it is imported: blocks that grow in place leave fewer holes between rows of
# changing sizes. Not by Ray's env_vars, which outrank what a node's environment says. torch's older
# name for it, PYTORCH_CUDA_ALLOC_CONF, outranks this one
ALLOCATOR_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


NODE_ENVIRONMENT = {
    **_MESSAGES,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # from the proxy to the gateways: faster, and a frozen gateway can't stop the proxy
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # in the proxy: a small body comes along with its request, and commands to Serve do not
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "ray_cluster.deployments.serve.early_body.proxy_middlewares"
    ),
    # uvicorn in that proxy would believe what peers on its machine say of themselves and the
    # address that they were called at; the gateways decide whom to believe, by the settings
    "FORWARDED_ALLOW_IPS": "",
    # at Ray's own 15, any other busy process of the machine starves the service
    "RAY_worker_niceness": "0",
}
"""Of all processes of a Ray node, whoever starts it."""


def apply_ray_environment(config: RayConfig) -> None:
    """Set what a local Ray takes over from this process; call before ray is imported.

    Ray keeps its token in the home folder and asks for it at its own ports and in its dashboard
    (``ray get-auth-token`` prints it). What is set already is left alone.
    """
    set_environment({"RAY_AUTH_MODE": config.auth, **NODE_ENVIRONMENT})
