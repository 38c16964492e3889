"""The dashboard as Grafana's JSON model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray_cluster.observability.dashboards.panels import ROWS, Panel

UID = "ray-cluster"
_TITLE = "ray-cluster"
# of Grafana 10 and later
_SCHEMA_VERSION = 39
_COLUMNS = 24
_PER_LINE = 4
_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard; whoever imports it chooses the data source at its top."""
    return {
        "uid": UID,
        "title": _TITLE,
        "description": "A ray-cluster service: what callers see, and its three loops.",
        "tags": ["ray-cluster"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "annotations": {"list": []},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    width = _COLUMNS // _PER_LINE
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top},
        }
        number, top = number + 1, top + 1
        for place, panel in enumerate(row.panels):
            line, column = divmod(place, _PER_LINE)
            grid = {"h": _HEIGHT, "w": width, "x": column * width, "y": top + line * _HEIGHT}
            yield _time_series(panel, number) | {"gridPos": grid}
            number += 1
        top += _HEIGHT * -(-len(row.panels) // _PER_LINE)


def _time_series(panel: Panel, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": one.expr,
                "legendFormat": one.legend or "__auto",
            }
            for index, one in enumerate(panel.queries)
        ],
    }
