"""Settings narrowed by a plan: it lowers batch caps and thresholds, and raises none."""

from __future__ import annotations

import hashlib
import json

from ray_cluster.config.cascades import CascadeConfig
from ray_cluster.config.settings import Settings
from ray_cluster.policies.plan import CascadePlan, PlannedSettings

_CAPS = "+"
_DIGITS = 6


def within(settings: Settings, plan: PlannedSettings | None) -> Settings:
    """Return the settings as a plan has them.

    Their version is that of the document; with a digest of the caps behind it, where these are
    below the document's, so that replicas apply them.
    """
    if plan is None:
        return settings
    caps = {
        one.name: planned
        for one in settings.pools
        if 1 <= (planned := dict(plan.max_batches).get(one.name, one.max_batch)) < one.max_batch
    }
    pools = tuple(
        one.model_copy(update={"max_batch": caps.get(one.name, one.max_batch)})
        for one in settings.pools
    )
    plans = {one.service: one for one in plan.cascades}
    cascades = tuple(_narrowed(one, plans.get(one.name)) for one in settings.cascades)
    version = settings.version
    if caps:
        digest = hashlib.sha256(json.dumps(caps, sort_keys=True).encode()).hexdigest()
        version += f"{_CAPS}{digest[:_DIGITS]}"
    changes = {"pools": pools, "cascades": cascades, "given_version": version}
    # not copied: a cached version would be, too
    return Settings.model_construct(**{**dict(settings), **changes})


def document_version(version: str) -> str:
    """Return the version of the document, from that of settings which a plan has narrowed."""
    return version.partition(_CAPS)[0]


def _narrowed(cascade: CascadeConfig, plan: CascadePlan | None) -> CascadeConfig:
    if plan is None:
        return cascade
    if cascade.threshold is not None:
        return cascade.model_copy(update={"threshold": min(cascade.threshold, plan.threshold)})
    rate = min(cascade.deferral_rate or 0.0, plan.deferral_rate)
    return cascade.model_copy(update={"deferral_rate": rate})
