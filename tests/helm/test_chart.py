"""What the chart renders: valid for KubeRay, Kubernetes and Serve, and the same as our own file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.deployments.app import build_app
from ray_cluster.deployments.serve.deploy_file import serve_config
from tests.helm.chart import (
    CHART,
    EXAMPLES,
    RELEASE,
    SCHEMAS,
    generator,
    helm,
    notes,
    pod_templates,
    render,
    service_of,
    settings_of,
    values,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate")

SETTINGS = Path("/etc/ray-cluster/settings/config.yaml")
# every kind of worker, and keys of all marks
ALL_KINDS: dict[str, Any] = {
    "pools": [
        {"name": "a", "model": "shapes-sd", "served_as": "m", "replicas": 3, "max_batch": 2},
        {"name": "b", "model": "shapes-sd-light", "num_threads": 2, "memory_gib": 1.5},
    ],
    "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
    "cascades": [
        {"name": "both", "light": "b", "heavy": "m", "discriminator": "judge", "threshold": 0.5}
    ],
    "controlnets": [
        {"name": "edges", "model": "shapes-sd-edges", "bases": ["m"], "replicas": 2},
        {"name": "layout", "model": "shapes-sd-layout", "bases": ["m"], "mode": "local"},
    ],
    "upscalers": [{"name": "big", "num_cpus": 0.5, "surge": True}],
    "limits": {"max_upload_bytes": 209715200, "max_input_bytes": 10000000},
    "http": {"port": 9000, "num_gateways": 3, "keep_alive_s": 30, "public_url": "https://a.b"},
    "logs": {"format": "json"},
    "dispatch": {"patience_s": 5},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in EXAMPLES},
    "all": {"config": ALL_KINDS},
    "planned": {"config": ALL_KINDS | {"control": {"enabled": True, "scaling": "policy"}}},
    "scaled": {"config": ALL_KINDS | {"control": {"enabled": True}, "loras": {"num_stores": 0}}},
}


def given(case: str) -> dict[str, Any]:
    return values(case) if case in EXAMPLES else CASES[case]


def config_of(case: str) -> ClusterConfig:
    return load_config(yaml.safe_load(settings_of(render(given(case)))))


def unknown_keys(kind: type[BaseModel], content: dict[str, Any], place: str = "") -> list[str]:
    """Return keys that a model of pydantic would ignore, as Serve's do."""
    return [f"{place}{key}" for key in content if key not in kind.model_fields]


@pytest.mark.parametrize("case", CASES)
def test_serves_config_is_that_of_the_command_line(case: str) -> None:
    rendered = yaml.safe_load(service_of(render(given(case)))["serveConfigV2"])
    own = serve_config(config_of(case), SETTINGS)
    applications = {one["name"]: one for one in own.pop("applications")}
    assert {one["name"]: one for one in rendered.pop("applications")} == applications
    assert rendered == own
    for one in applications.values():
        build_app(one["args"])


@pytest.mark.parametrize("case", CASES)
def test_serve_knows_every_key(case: str) -> None:
    rendered = yaml.safe_load(service_of(render(given(case)))["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(rendered)
    assert not unknown_keys(ServeDeploySchema, rendered)
    for one, known in zip(rendered["applications"], schema.applications, strict=True):
        assert not unknown_keys(type(known), one)
        [deployment], [schema_of] = one["deployments"], known.deployments
        assert not unknown_keys(type(schema_of), deployment)


@pytest.mark.parametrize("example", EXAMPLES)
def test_objects_are_valid_for_kubernetes(example: str) -> None:
    for (kind, name), one in render(values(example)).items():
        if "." in one["apiVersion"].partition("/")[0] and not one["apiVersion"].startswith(
            ("networking.k8s.io/", "rbac.")
        ):
            continue
        kubernetes_validate.validate(one, "1.34", strict=True)
        assert len(name) <= 63, (kind, name)


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason="the schemas of custom resources are not here")
@pytest.mark.parametrize("example", EXAMPLES)
def test_custom_resources_are_valid(example: str) -> None:
    checked = set()
    for (kind, _), one in render(values(example)).items():
        path = SCHEMAS / f"{kind.lower()}_v1.json"
        if path.is_file():
            # not `validate`: that checks the schema first, which has Go's regular expressions
            schema = jsonschema.Draft202012Validator(json.loads(path.read_text()))
            assert not [error.message for error in schema.iter_errors(one)]
            checked.add(kind)
    assert "RayService" in checked
    assert example != "ha" or checked == {"RayService", "PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_the_operator_refuses_is_not_rendered(example: str) -> None:
    spec = service_of(render(values(example)))
    cluster = spec["rayClusterConfig"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "tokens"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        params = group["rayStartParams"]
        assert all(isinstance(value, str) for value in params.values())
        assert "labels" not in params
        assert "resources" not in group
        pod = group["template"]["spec"]
        assert pod.get("restartPolicy", "Never") == "Never", "the autoscaler's v2"
        names = {one["name"] for one in pod["containers"][0]["env"]}
        assert not names & {
            "RAY_REDIS_ADDRESS",
            "REDIS_PASSWORD",
            "REDIS_USERNAME",
            "RAY_enable_autoscaler_v2",
        }
        assert len(names) == len(pod["containers"][0]["env"])
    names = [one["groupName"] for one in cluster["workerGroupSpecs"]]
    assert len(names) == len(set(names))
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert "headService" not in cluster["headGroupSpec"]
    assert len(cluster["headGroupSpec"]["template"]["spec"]["containers"]) == 1


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_are_restricted(example: str) -> None:
    objects = render(values(example))
    pods = [one["spec"] for one in pod_templates(service_of(objects)).values()]
    for (kind, _), one in objects.items():
        if kind == "Pod":
            pods.append(one["spec"])
        if kind == "Job":
            pods.append(one["spec"]["template"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        allowed = {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= allowed
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any(
                "subPath" in one and one["name"] != "scratch" for one in container["volumeMounts"]
            )


def test_settings_and_keys_touch_no_pod_and_no_application() -> None:
    before = render(values("ha"))
    changed = values("ha")
    changed["config"]["limits"] = {"max_queued_images": 7}
    changed["config"]["http"] |= {"public_url": "https://images.example.com"}
    changed["config"]["pools"][0] |= {"max_batch": 2, "max_replicas": 9}
    after = render(changed)
    assert settings_of(before) != settings_of(after)
    assert service_of(before) == service_of(after)
    assert before.keys() == after.keys()


def test_a_release_changes_nothing_of_a_pod_but_its_image(tmp_path: Path) -> None:
    later = tmp_path / "ray-cluster"
    shutil.copytree(CHART, later)
    chart = later / "Chart.yaml"
    chart.write_text(chart.read_text().replace("0.1.0", "0.2.0"))
    before = render(values("ha"))
    after = render(values("ha"), chart=later)
    assert service_of(before) == service_of(after)
    without_tag = values("ha") | {"image": {"repository": "r"}}
    assert (
        pod_templates(service_of(render(without_tag, chart=later)))["head"]["spec"]["containers"][
            0
        ]["image"]
        == "r:0.2.0"
    )


def test_front_and_gpus_are_apart() -> None:
    spec = service_of(render(values("gpu")))
    assert spec["excludeHeadPodFromServeSvc"] is True
    cluster = spec["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    by_name = {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    assert by_name.keys() == {"front", "l40s", "h100"}
    for name, group in by_name.items():
        named = {name} if name == "front" else {name, "models"}
        # as a shell takes it from the operator's command
        assert json.loads(json.loads(group["rayStartParams"]["resources"])).keys() == named
    for name, pool in (("l40s", "sdxl"), ("h100", "flux")):
        application = next(
            one
            for one in yaml.safe_load(spec["serveConfigV2"])["applications"]
            if one["name"] == pool
        )
        [own] = application["args"]["worker"]["pools"]
        assert own["node_resource"] == name
        [container] = by_name[name]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    templates = pod_templates(spec)
    for name, template in templates.items():
        mounts = {one["mountPath"] for one in template["spec"]["containers"][0]["volumeMounts"]}
        assert ("/etc/ray-cluster/settings" in mounts) == (name == "front")
        assert ("/etc/ray-cluster/keys" in mounts) == (name == "front")


def test_secrets_are_referred_to_and_nowhere_else() -> None:
    objects = render(values("ha"))
    text = yaml.safe_dump_all(objects.values())
    assert "postgresql" not in text
    config = load_config(yaml.safe_load(settings_of(objects)))
    assert config.storage.jobs_file == "/etc/ray-cluster/job-store/url"
    assert config.http.api_keys_file == "/etc/ray-cluster/keys/api-keys.yaml"
    # replicas write to S3, too
    for template in pod_templates(service_of(objects)).values():
        [container] = template["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]


def test_a_job_that_differs_has_another_name() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]},
        {"models": {"enabled": True, "existingClaim": "models"}},
        {"image": {"repository": "ray-cluster", "tag": "later"}},
    ]
    jobs = {}
    for one in changes:
        objects = render(values("gpu") | one)
        [name] = [name for kind, name in objects if kind == "Job"]
        assert len(name) <= 63
        jobs[name] = objects["Job", name]["spec"]["template"]
    assert len(jobs) == len(changes)


def test_prometheus_reads_one_target_however_many_pods_there_are() -> None:
    objects = render(values("ha"))
    [endpoint] = objects["PodMonitor", RELEASE]["spec"]["podMetricsEndpoints"]
    address, dropped = endpoint["relabelings"]
    [port] = objects["Service", RELEASE]["spec"]["ports"]
    assert address == {
        "targetLabel": "__address__",
        "replacement": f"{RELEASE}.prod.svc:{port['port']}",
    }
    # the labels that tell pods apart
    assert dropped == {"action": "labeldrop", "regex": "pod|container"}


def test_kuberay_finds_the_port_of_a_pods_proxy() -> None:
    templates = pod_templates(service_of(render({"config": {"http": {"port": 9000}}})))
    [port] = templates["cpu"]["spec"]["containers"][0]["ports"]
    assert port == {"name": "serve", "containerPort": 9000}


def test_the_test_pod_may_call_whoever_else_may() -> None:
    given = values("ha") | {"networkPolicy": {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}
    objects = render(given)
    [rule] = objects["NetworkPolicy", f"{RELEASE}-api"]["spec"]["ingress"]
    labels = objects["Pod", f"{RELEASE}-test"]["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": labels}} in rule["from"]


def test_generated_files_are_up_to_date() -> None:
    for name, text in generator().written().items():
        assert (CHART / name).read_text() == text, f"run: python helm/generate.py ({name})"


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm.lint(str(CHART))
    assert [one for one in found["messages"] if one["severity"] > 1] == []
    assert not found["errors"]


def test_alerts_are_rules_of_prometheus(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    objects = render(values("ha"))
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(objects["PrometheusRule", RELEASE]["spec"]))
    done = subprocess.run(
        [promtool, "check", "rules", rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_notes_say_the_first_call_and_what_an_upgrade_needs() -> None:
    text = notes(values("gpu"))
    assert "10 GPUs in place of 5" in text
    assert '"model": "sdxl"' in text
    assert "Authorization: Bearer $KEY" in text
    assert "Anybody" not in text
    assert "Anybody who reaches the Service may call" in notes(values("minimal"))
    assert re.search(r"port-forward service/images 8000:80", text)


def test_what_yaml_would_take_for_something_else_is_quoted() -> None:
    odd = values("ha")
    odd["ingress"] |= {"host": "*.example.com", "tlsSecret": "1234", "className": "on"}
    odd["apiKeys"] = {"secret": "5678"}
    objects = render(odd)
    [rule] = objects["Ingress", RELEASE]["spec"]["rules"]
    assert rule["host"] == "*.example.com"
    kubernetes_validate.validate(objects["Ingress", RELEASE], "1.34", strict=True)
    front = pod_templates(service_of(objects))["front"]["spec"]["volumes"]
    assert {"name": "keys", "secret": {"secretName": "5678"}} in front
