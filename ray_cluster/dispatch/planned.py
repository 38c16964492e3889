"""Settings narrowed by a plan: it lowers batch caps and thresholds, and raises none.

A lowered threshold is for a heavy model that has much to do. While it has not, more images may be
made anew, as far as the plan finds them worth it and the settings allow it.
"""

from __future__ import annotations

import hashlib
import json

from ray_cluster.config.settings import CascadeSettings, Settings
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings

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


def _narrowed(cascade: CascadeSettings, plan: CascadePlan | None) -> CascadeSettings:
    if plan is None:
        return cascade
    changes: dict[str, float | None] = {"idle_threshold": plan.idle_threshold}
    if cascade.threshold is not None:
        changes["threshold"] = min(cascade.threshold, plan.threshold)
        if plan.idle_threshold is not None:
            changes["idle_threshold"] = min(cascade.threshold, plan.idle_threshold)
    else:
        changes["deferral_rate"] = min(cascade.deferral_rate or 0.0, plan.deferral_rate)
        changes["idle_deferral_rate"] = cascade.deferral_rate
    return cascade.model_copy(update=changes)
