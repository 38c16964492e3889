"""What ``settings show`` writes."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from ray_cluster.deployments.live_settings import SettingsReport

_DIGEST_CHARS = 8


def shown(report: SettingsReport) -> str:
    """Return the settings as YAML, with a head that says who goes by them."""
    content = report.settings.model_dump(mode="json")
    digests = content.pop("api_key_digests")
    keys = [f"sha256:{digest[:_DIGEST_CHARS]}..." for digest in digests]
    content = {"http": {"api_keys": keys}, **content}
    return "\n".join([*_head(report), "", yaml.safe_dump(content, sort_keys=False).rstrip()])


def _head(report: SettingsReport) -> Iterator[str]:
    yield f"# version {report.version}, of {report.path or 'the start: no file is watched'}"
    if report.problem:
        yield f"# {report.problem}"
    for gateway, version in sorted(report.version_by_gateway.items()):
        yield f"# {gateway}: {version or 'none yet'}"
    for one in sorted(report.replicas, key=lambda one: (one.pool, one.replica_id)):
        yield (
            f"# replica {one.replica_id} of {one.pool}: {one.version or 'none yet'}, "
            f"max_batch {one.max_batch}, max_in_flight {one.max_in_flight}"
        )
