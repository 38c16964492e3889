"""Values that would not work are refused before anything is installed, in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.helm.chart import helm, render, values

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("a key that there is not", {"grups": {}}, "grups.*not allowed"),
    (
        "a key of the configuration that there is not",
        {"config": {"poolz": []}},
        "poolz.*not allowed",
    ),
    (
        "a value of the wrong kind in the configuration",
        {"config": {"limits": {"max_queued_images": "many"}}},
        "max_queued_images.*got string, want integer",
    ),
    ("a listener of one machine", {"config": {"http": {"host": "127.0.0.1"}}}, "set it to 0.0.0.0"),
    (
        "a plain API key",
        {"config": {"http": {"api_keys": ["secret"]}}},
        "put keys into a Secret and name it in apiKeys.secret",
    ),
    (
        "a password",
        {"config": {"storage": {"jobs": "postgresql://me:secret@db/jobs"}}},
        "put the URL into a Secret and name it in jobStore.secret",
    ),
    (
        "SQLite on several machines",
        {"volume": {"accessModes": ["ReadWriteMany"]}},
        "use PostgreSQL by jobStore.secret",
    ),
    (
        "storage in a folder of a pod",
        {"config": {"storage": {"results": ".ray-cluster/results"}}},
        "give a path on the volume",
    ),
    ("storage without its volume", {"volume": {"enabled": False}}, "volume.enabled is false"),
    (
        "folders that are not shared",
        {"config": {"storage": {"is_shared": False}}},
        "set config.storage.is_shared: true",
    ),
    (
        "GPUs that no group has",
        {"config": {"pools": [{"name": "a", "model": "b/c", "device": "cuda", "num_gpus": 1}]}},
        "set groups.NAME.gpus",
    ),
    (
        "a pool on pods that no group has",
        {"config": {"pools": [{"name": "a", "model": "shapes-sd", "node_resource": "a100"}]}},
        "name a group",
    ),
    (
        "Ray's state of two clusters in one place",
        {"gcsFaultTolerance": {"externalStorageNamespace": "mine"}},
        "leave it out, KubeRay gives every cluster its own",
    ),
    (
        "two stores of Ray's state",
        {"gcsFaultTolerance": {"redis": {"address": "r:6379"}, "rocksdb": {"enabled": True}}},
        "choose one",
    ),
    (
        "an incremental upgrade without what it needs",
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
        "needs autoscaler.enabled: true and upgrade.gatewayClassName",
    ),
    (
        "a drain that is cut off",
        {"upgrade": {"deletionDelaySeconds": 30}},
        "raise the first",
    ),
    (
        "bounds that nobody reads",
        {"groups": {"cpu": {"maxReplicas": 4}}},
        "set autoscaler.enabled: true",
    ),
    (
        "a bound below the count",
        {"autoscaler": {"enabled": True}, "groups": {"cpu": {"replicas": 4, "maxReplicas": 2}}},
        "below replicas or minReplicas: raise it",
    ),
    ("a group of the chart's own", {"groups": {"front": {"replicas": 1}}}, "choose another"),
    (
        "a dispatcher that scaling takes away",
        {"config": {"dispatch": {"front_resource": None}}},
        "set it to front",
    ),
    (
        "pods that fetch no LoRAs",
        {"groups": {"cpu": {"rayStartParams": {"resources": '"{\\"cpu\\": 1}"'}}}},
        "config.loras.node_resource: null",
    ),
    ("Ray of one machine", {"config": {"ray": {"num_cpus": 4}}}, "leave it out"),
    ("an entry without a host", {"ingress": {"enabled": True}}, "needs ingress.host"),
    ("a route without a Gateway", {"httpRoute": {"enabled": True}}, "needs httpRoute.parentRefs"),
    ("a name that is too long", {"fullnameOverride": "a" * 48}, "KubeRay allows 47"),
]


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(base)
    for key, value in change.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) else value
    return found


@pytest.mark.parametrize(
    ("change", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_misuse_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    render(values("minimal"))
    with pytest.raises(helm.HelmError, match=f"(?s){words}"):
        render(merged(values("minimal"), change))
