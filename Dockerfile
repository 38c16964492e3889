# The service as an image, for one machine (compose.yaml) and for the nodes of a Ray cluster.
#
#   docker build --target cpu -t ray-cluster:cpu .
#   docker build --target gpu -t ray-cluster:gpu .
#
# It runs as user 1000, and with a read-only root file system. What is written:
#
#   /var/lib/ray-cluster   HOME and working folder: jobs, images, LoRAs, Ray's token, Triton's cache
#   /models                HF_HOME: models from the hub
#   /tmp                   Ray's session with its logs and sockets
#   /dev/shm               Ray's object store, 256 MiB unless ray.object_store_mib says otherwise
#
# No weights are in it but those of the bundled models.

# Ray's version is that of constraints.txt, Python's the oldest that the project runs with
ARG RAY_IMAGE=rayproject/ray:2.60.0-py311


FROM ${RAY_IMAGE}-cpu AS build
# no image is made of this stage
# hadolint ignore=DL3002
USER 0
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt setuptools


# A wheel without code, which requires the same: an edit of the code does not install torch again.
FROM build AS requirements
COPY pyproject.toml README.md LICENSE ./
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels . \
    && cp constraints.txt /wheels/


# The wheel has real files where ray_cluster/{policies,kernels,deployments} are links.
FROM build AS wheel
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .


FROM ${RAY_IMAGE}-cpu AS cpu

# PyPI's torch brings gigabytes of CUDA
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

USER 0
# Ray's image lets its user become root without a password
RUN sed -i '/^ray /d' /etc/sudoers \
    && install -d -o 1000 -g 100 /var/lib/ray-cluster /etc/ray-cluster /models
USER 1000:100
WORKDIR /var/lib/ray-cluster

# torch alone comes from its index. Bytecode is compiled here, as nothing can be written later; that
# of Ray's own packages, too. Some of them have templates that are no Python, hence `|| true`
RUN --mount=type=bind,from=requirements,source=/wheels,target=/requirements \
    pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        -c /requirements/constraints.txt torch \
    && pip install --no-cache-dir -c /requirements/constraints.txt \
        "$(echo /requirements/ray_cluster-*.whl)[postgresql,cloud]" \
    && { python -m compileall -q -j 0 "$(python -c 'import site; print(site.getsitepackages()[0])')" \
        > /dev/null || true; }
# last, and seen to work: the command imports, and finds the files that come with it
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheel \
    pip install --no-cache-dir --no-deps --force-reinstall /wheel/ray_cluster-*.whl \
    && ray-cluster config > /dev/null

# What Ray's processes read, whoever starts them: those of deployments/serve/ray_environment.py
ENV FORWARDED_ALLOW_IPS="" \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_cluster.deployments.serve.early_body.proxy_middlewares \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=268435456 \
    RAY_SERVE_USE_GRPC_BY_DEFAULT=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0
ENV HOME=/var/lib/ray-cluster \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1

VOLUME ["/var/lib/ray-cluster", "/models"]
EXPOSE 8000
ENTRYPOINT ["ray-cluster"]
CMD ["serve", "--host", "0.0.0.0"]


# The same on Ray's CUDA image, which has the compiler that Triton calls.
FROM ${RAY_IMAGE}-gpu AS gpu

# PyPI's build; for an older driver, for instance https://download.pytorch.org/whl/cu126
ARG TORCH_INDEX=

USER 0
RUN sed -i '/^ray /d' /etc/sudoers \
    && install -d -o 1000 -g 100 /var/lib/ray-cluster /etc/ray-cluster /models
USER 1000:100
WORKDIR /var/lib/ray-cluster

RUN --mount=type=bind,from=requirements,source=/wheels,target=/requirements \
    pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        -c /requirements/constraints.txt torch \
    && pip install --no-cache-dir -c /requirements/constraints.txt \
        "$(echo /requirements/ray_cluster-*.whl)[postgresql,cloud,gpu]" \
    && { python -m compileall -q -j 0 "$(python -c 'import site; print(site.getsitepackages()[0])')" \
        > /dev/null || true; }
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheel \
    pip install --no-cache-dir --no-deps --force-reinstall /wheel/ray_cluster-*.whl \
    && ray-cluster config > /dev/null

ENV FORWARDED_ALLOW_IPS="" \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=ray_cluster.deployments.serve.early_body.proxy_middlewares \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=268435456 \
    RAY_SERVE_USE_GRPC_BY_DEFAULT=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0
ENV HOME=/var/lib/ray-cluster \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1
# the driver's folders alone: torch brings its own CUDA, which that of the base must not hide
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

VOLUME ["/var/lib/ray-cluster", "/models"]
EXPOSE 8000
ENTRYPOINT ["ray-cluster"]
CMD ["serve", "--host", "0.0.0.0"]
