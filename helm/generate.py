"""Writes what the chart has from the code: ``python helm/generate.py``.

- ``files/slices.json``: which keys of the configuration each application is started with;
- ``values.schema.json``: what values are allowed, those of ``config`` by the configuration's own
  schema;
- ``files/alerts.yaml`` and ``files/dashboard.json``: as ``ray-cluster observe`` writes them;
- the table of values in ``README.md``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from ray_cluster.config.kinds import GROUP_DEPLOYMENT, KINDS, LORAS
from ray_cluster.config.loading import ClusterConfig, Document, section_of
from ray_cluster.config.section import Section, marked_keys
from ray_cluster.config.slices import OF_ALL, OF_CONTROLLER, OF_FRONT
from ray_cluster.deployments.serve import deploy_file, ray_environment
from ray_cluster.observability.dashboards.alerts import alert_rules
from ray_cluster.observability.dashboards.grafana import dashboard

CHART = Path(__file__).parent / "ray-cluster"
_TABLE = re.compile(r"(?s)(<!-- values -->\n).*(<!-- end of values -->)")


def written() -> dict[str, str]:
    """Return the content of each generated file by its path in the chart."""
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    return {
        "files/slices.json": _json(slices()),
        "values.schema.json": _json(schema()),
        "files/alerts.yaml": yaml.safe_dump(alert_rules(), sort_keys=False, width=100),
        "files/dashboard.json": _json(dashboard()),
        "README.md": _TABLE.sub(lambda found: found[1] + table(values) + found[2], readme),
    }


def slices() -> dict[str, Any]:
    """Return what the chart must know of the configuration to write Serve's config file."""
    listed = [
        {
            "kind": kind,
            "section": row.section,
            "deployment": row.deployment,
            "reads": _keys((*OF_ALL, *row.also_reads), for_front=False),
            "own": sorted(marked_keys(section_of(row), "redeploy")),
        }
        for kind, row in KINDS.items()
        if not row.is_light
    ]
    empty = Document()
    return {
        "front": _keys(OF_FRONT),
        "controller": _keys(OF_CONTROLLER),
        "loras": _keys((*OF_ALL, KINDS["lora"].section), for_front=False),
        "workers": listed,
        "environment": ray_environment.NODE_ENVIRONMENT,
        "names": {
            "builder": deploy_file.BUILDER,
            "controller": deploy_file.CONTROLLER_DEPLOYMENT,
            "gateway": deploy_file.GATEWAY,
            "group": GROUP_DEPLOYMENT,
            "loras": KINDS["lora"].deployment,
            "lorasApplication": LORAS,
        },
        "defaults": {
            "keepAlive": empty.http.keep_alive_s,
            "gateways": empty.http.num_gateways,
            "stores": empty.loras.num_stores,
            "scaling": empty.control.scaling,
        },
        "policy": deploy_file.scaled_by_policy(0),
        "surgePercent": deploy_file.SURGE_PERCENT,
    }


def _keys(sections: tuple[str, ...], *, for_front: bool = True) -> dict[str, list[str]]:
    found = {}
    for name in sections:
        kind: type[Section] = type(getattr(Document(), name))
        found[name] = sorted(marked_keys(kind, "redeploy", for_front=for_front))
    return found


def schema() -> dict[str, Any]:
    """Return the schema of values: ours, and the configuration's as ``config``."""
    own: dict[str, Any] = yaml.safe_load((CHART.parent / "values.schema.yaml").read_text("utf-8"))
    config = _strict(ClusterConfig.model_json_schema())
    own["$defs"] |= config.pop("$defs")
    # plain keys are refused by the templates, in words
    own["$defs"]["KeyConfig"] = {"anyOf": [{"type": "string"}, own["$defs"]["KeyConfig"]]}
    own["properties"]["config"] = config
    return own


def _strict(node: Any) -> Any:
    """Return a schema without what only describes."""
    if isinstance(node, list):
        return [_strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _strict(value) if key != "properties" else {k: _strict(v) for k, v in value.items()}
        for key, value in node.items()
        if key not in {"title", "applied", "front", "calls"} or not isinstance(value, str | bool)
    }


def table(values: str) -> str:
    """Return the table of values: keys, defaults, and the comments above them."""
    rows: list[str] = []
    path: list[str] = []
    words = ""
    for line in values.splitlines():
        found = re.match(r"( *)(#|[A-Za-z][\w-]*:)(.*)", line)
        if found is None:
            words = ""
            continue
        indent, mark, rest = found.groups()
        if mark == "#":
            words = f"{words} {rest.strip()}".strip()
            continue
        path = [*path[: len(indent) // 2], mark[:-1]]
        value = rest.strip()
        if words:
            rows.append(f"| `{'.'.join(path)}` | {f'`{value}`' if value else ''} | {words} |")
        words = ""
    return "| value | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    for name, text in written().items():
        (CHART / name).write_text(text, encoding="utf-8")
