"""docs/kubernetes.md against the chart: what it names is there, and nothing is left out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import yaml

from ray_cluster.config.loading import load_config
from tests.helm.chart import (
    CHART,
    EXAMPLES,
    RELEASE,
    ROOT,
    notes,
    pod_templates,
    render,
    service_of,
    settings_of,
    values,
)

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
PROSE = re.sub(r"(?ms)^ *```.*?^ *```", "", PAGE)
INLINE = re.findall(r"`([^`\n]+)`", PROSE)
KINDS = {"service": "Service", "rayservice": "RayService", "pvc": "PersistentVolumeClaim"}
# what KubeRay makes of a RayService, and what its own chart installs
OF_KUBERAY = {f"service/{RELEASE}-head-svc", "deployment/kuberay-operator"}
# the reader's own
OTHERS = {"POD", "$CLUSTER", "secret", "--timeout=20m"}


@cache
def rendered(example: str) -> dict[tuple[str, str], dict[str, Any]]:
    return render(values(example))


def commands(program: str) -> list[list[str]]:
    """Return the words of each command of a program, in blocks and in the text."""
    blocks = re.findall(r"(?ms)^ *```console\n(.*?)^ *```", PAGE)
    lines = [
        line.replace("\\\n", " ")
        for block in blocks
        for line in re.split(r"(?m)^ *\$ ", block)
        if line.strip()
    ]
    found = [
        part for line in [*lines, *INLINE] for part in re.findall(rf"\b{program} [^|&)]+", line)
    ]
    return [words for one in found if len(words := shlex.split(one, comments=True)) > 2]


def objects_of(words: list[str]) -> list[str]:
    """Return what a command of kubectl acts on, as kind/name."""
    words = [word for word in words[1:] if word not in {"-n", "prod", "kuberay-system"}]
    if words[0] in {"create", "exec", "patch"} or "-l" in words:
        return []
    verb, *rest = words
    named = [word for word in rest if "/" in word and not word.startswith(("-", "{"))]
    if named or verb == "logs":
        return named
    kind, *names = rest
    until = next((i for i, word in enumerate(names) if word.startswith("-")), len(names))
    return [f"{kind}/{name}" for name in names[:until]]


def test_every_object_of_a_command_is_one_of_the_release() -> None:
    there = {key for example in EXAMPLES for key in rendered(example)}
    found = [one for words in commands("kubectl") for one in objects_of(words)]
    assert len(found) >= 8, found
    for one in found:
        kind, _, name = one.partition("/")
        if one not in OF_KUBERAY and name not in OTHERS:
            assert (KINDS[kind], name) in there, one
    configmap = re.findall(r"ConfigMap `([^`]+)`", PROSE)
    assert configmap
    assert all(("ConfigMap", name) in there for name in configmap)


def test_labels_and_containers_are_those_of_the_pods() -> None:
    spec = service_of(rendered("gpu"))
    templates = pod_templates(spec)
    names = {one["name"] for t in templates.values() for one in t["spec"]["containers"]}
    for words in commands("kubectl"):
        for option, given in pairwise(words):
            if option == "-c" and words[0] == "kubectl" and given.startswith("ray-"):
                assert given in names
            if option == "-l":
                labels = dict(one.split("=") for one in given.split(","))
                group = labels.pop("ray.io/group", "front")
                assert labels.items() <= templates[group]["metadata"]["labels"].items()
    for name in re.findall(r"\b(ray-(?:head|front|worker))\b", PAGE):
        assert name in names
    groups = [one["groupName"] for one in spec["rayClusterConfig"]["workerGroupSpecs"]]
    assert groups == ["front", *sorted(values("gpu")["groups"].keys() - {"cpu"})]


def test_helm_is_called_with_what_is_there() -> None:
    found = commands("helm")
    assert {words[1] for words in found} >= {"install", "upgrade", "rollback", "test", "uninstall"}
    for words in found:
        if "kuberay-operator" in words or words[1] == "repo":
            continue
        assert words[2] == RELEASE, words
        assert words[words.index("-n") + 1] == "prod", words
        for option, given in pairwise(words):
            if option == "-f" and given != "my-values.yaml":
                assert (ROOT / given).is_file(), given
        if words[1] in {"install", "upgrade"}:
            assert ROOT / words[3] == CHART


def secrets_of(node: Any) -> set[str]:
    """Return the Secrets that objects refer to."""
    if isinstance(node, list):
        return {name for one in node for name in secrets_of(one)}
    if not isinstance(node, dict):
        return set()
    found = {node["secretName"]} if isinstance(node.get("secretName"), str) else set()
    for key in ("secretRef", "secretKeyRef"):
        if key in node:
            found.add(node[key]["name"])
    return found | {name for one in node.values() for name in secrets_of(one)}


def test_the_secrets_of_each_example_are_listed_and_made() -> None:
    made = {
        words[words.index("generic") + 1] for words in commands("kubectl") if "generic" in words
    }
    needed = set()
    for example in EXAMPLES:
        [row] = re.findall(rf"^\| \[{example}\]\(.*$", PAGE, re.MULTILINE)
        listed = set(re.findall(r"`(\w+)`", row.split("|")[3]))
        refers = secrets_of(
            [one for (kind, _), one in rendered(example).items() if kind != "Ingress"]
        )
        assert listed == refers, example
        needed |= listed
    assert made == needed


@cache
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def is_allowed(keys: Sequence[str], node: dict[str, Any]) -> bool:
    """Whether a schema knows the value at a path; `*` is any name."""
    if "$ref" in node:
        return is_allowed(keys, schema()["$defs"][node["$ref"].rpartition("/")[2]])
    if not keys:
        return True
    first, *rest = keys
    others = [*node.get("anyOf", ()), *node.get("allOf", ())]
    if first == "*":
        others = [*others, node.get("additionalProperties") or {}]
        return any(is_allowed(rest, one) for one in others if "$ref" in one)
    below = node.get("properties", {}).get(first)
    if below is not None and is_allowed(rest, below):
        return True
    return any(is_allowed(keys, one) for one in others)


def test_every_value_is_one_of_the_chart() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = {one.partition(":")[0] for one in INLINE if re.match(r"[a-zA-Z]+\.[\w.*]+(:|$)", one)}
    paths = {one for one in paths if one.partition(".")[0] in defaults}
    assert len(paths) > 30
    for path in paths:
        assert is_allowed(path.split("."), schema()), path
        node = defaults
        for key in path.split(".") if not path.startswith(("config.", "groups.")) else ():
            assert key in node, path
            node = node[key]


def test_the_pools_on_two_kinds_of_gpus_are_taken() -> None:
    [block] = re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE)
    given = values("gpu")
    given["config"] |= yaml.safe_load(block)["config"]
    given["groups"]["l4"] = given["groups"].pop("l40s")
    config = load_config(yaml.safe_load(settings_of(render(given))))
    assert [(one.served_as, one.node_resource) for one in config.pools] == [
        ("mine", "h100"),
        ("mine", "l4"),
    ]


def test_every_alert_has_a_row() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    alerts = [one["alert"] for group in rules["groups"] for one in group["rules"]]
    assert re.findall(r"^\| `(RayCluster\w+)` \|", PAGE, re.MULTILINE) == alerts


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_first_call_is_that_of_an_install(example: str) -> None:
    said = " ".join(notes(values(example)).split())
    for part in (
        f"port-forward service/{RELEASE} 8000:80",
        f"-l app.kubernetes.io/instance={RELEASE},ray.io/group=front",
        "curl -s http://127.0.0.1:8000/v1/images/generations",
    ):
        assert part in said
        assert part in PAGE


def test_the_page_is_short_and_its_lines_too() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 320
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
