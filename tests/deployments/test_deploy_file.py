"""Serve's own config file, by its own schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from ray_cluster.config.loading import load_config
from ray_cluster.deployments.app import build_app
from ray_cluster.deployments.serve.deploy_file import PLAN_SCALING, serve_config

CELL: dict[str, Any] = {
    "pools": [
        {"name": "sd", "model": "shapes-sd", "replicas": 2},
        {"name": "draft", "model": "shapes-sd-light"},
    ],
    "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
    "controlnets": [{"name": "edges", "model": "shapes-sd-edges", "bases": ["sd"]}],
}
WORKERS = {"sd": 2, "draft": 1, "judge": 1, "edges": 1}
OTHERS = {"front", "loras", "controller"}


def deployed(**control: Any) -> ServeDeploySchema:
    config = load_config({**CELL, "control": control})
    return ServeDeploySchema.model_validate(serve_config(config, Path("/etc/my.yaml")))


@pytest.mark.parametrize(
    "control",
    [
        {"enabled": True},
        {"enabled": True, "scaling": "endpoint"},
        # nobody plans: counts stay what an operator makes them
        {"enabled": False, "scaling": "policy"},
    ],
)
def test_the_scale_endpoint_acts_on_workers_alone(control: dict[str, Any]) -> None:
    for one in deployed(**control).applications:
        assert one.external_scaler_enabled == (one.name in WORKERS.keys() | {"loras"})
        [deployment] = one.deployments
        assert not deployment.is_autoscaling_configured()
        assert deployment.num_replicas == WORKERS.get(one.name, 1)


def test_an_autoscaling_policy_acts_on_workers_alone() -> None:
    applications = {one.name: one for one in deployed(enabled=True, scaling="policy").applications}
    assert applications.keys() == WORKERS.keys() | OTHERS
    for name in OTHERS:
        [deployment] = applications[name].deployments
        assert (deployment.num_replicas, deployment.is_autoscaling_configured()) == (1, False)
    for name, num_replicas in WORKERS.items():
        assert not applications[name].external_scaler_enabled
        [deployment] = applications[name].deployments
        scaling = AutoscalingConfig.model_validate(deployment.autoscaling_config)
        assert scaling.policy.policy_function == PLAN_SCALING
        assert (scaling.initial_replicas, scaling.min_replicas) == (num_replicas, 0)
        assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0)
        assert applications[name].args.keys() == {"worker"}
    assert applications["controller"].args["controller"]["control"]["scaling"] == "policy"


def test_a_pool_runs_where_its_resource_is() -> None:
    first, *others = CELL["pools"]
    config = load_config({**CELL, "pools": [first | {"node_resource": "h100"}, *others]})
    for one in serve_config(config, Path("/etc/my.yaml"))["applications"]:
        options = build_app(one["args"])._bound_deployment.ray_actor_options
        wanted = {"h100": pytest.approx(0.001)} if one["name"] == first["name"] else None
        assert options.get("resources") == wanted


def test_the_front_runs_where_its_resource_is() -> None:
    config = load_config(
        {**CELL, "dispatch": {"front_resource": "front"}, "control": {"enabled": True}}
    )
    found = serve_config(config, Path("/etc/my.yaml"))
    args = {one["name"]: one["args"] for one in found["applications"]}
    for name, content in args.items():
        application = build_app(content)
        options = application._bound_deployment.ray_actor_options
        wanted = {"front": pytest.approx(0.001)} if name in {"front", "controller"} else None
        assert options.get("resources") == wanted
        assert ("front_resource" in str(content)) == (name in {"front", "controller"})
