"""The chart as Helm's own SDK renders it; the modules that need it are skipped, loudly, without."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "ray-cluster"
EXAMPLES = ("minimal", "cascade", "gpu", "ha")
SCHEMAS = ROOT.parent / "shared" / "crds" / "json"
RELEASE = "images"

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (extra dev)")


def values(example: str) -> dict[str, Any]:
    """Return the values of an example."""
    found: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    return found


def render(
    given: dict[str, Any], *, name: str = RELEASE, chart: Path = CHART
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects that values make, by kind and name."""
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render(given, name=name, namespace="prod")
    found = [
        one
        for path, text in texts.items()
        if not path.endswith(".txt")
        for one in yaml.safe_load_all(text)
        if one
    ]
    objects = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(objects) == len(found), "two objects of one name"
    return objects


def notes(given: dict[str, Any]) -> str:
    """Return what an install prints."""
    with helm.Chart.load(str(CHART)) as loaded:
        texts = loaded.render(given, name=RELEASE, namespace="prod")
    return str(next(text for path, text in texts.items() if path.endswith("NOTES.txt")))


def service_of(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of the RayService."""
    [found] = [one for (kind, _), one in objects.items() if kind == "RayService"]
    spec: dict[str, Any] = found["spec"]
    return spec


def settings_of(objects: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the text of the watched configuration."""
    text: str = objects["ConfigMap", f"{RELEASE}-settings"]["data"]["config.yaml"]
    return text


def pod_templates(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of a RayService by group."""
    cluster = spec["rayClusterConfig"]
    groups = {one["groupName"]: one["template"] for one in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def generator() -> ModuleType:
    """Return ``helm/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "helm" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
