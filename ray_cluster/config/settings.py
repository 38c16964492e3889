"""The settings: the part of a configuration that changes while the service runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, get_origin

from pydantic import SecretStr

from ray_cluster.config.loading import ClusterConfig, Document
from ray_cluster.config.section import Section, part
from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorConfig
from ray_cluster.config.sections.keys import ApiKey, check_distinct
from ray_cluster.errors import ConfigError

_VERSION_CHARS = 12
# sections with settings: single ones, and all lists
_SINGLE = ("http", "limits", "dispatch", "storage", "loras", "control")
_LISTS = tuple(
    name for name, one in Document.model_fields.items() if get_origin(one.annotation) is tuple
)
# of the section `http`, in no slice of it
_KEYS = ("api_keys", "api_keys_file", "open")
_FOR_GATEWAYS = {"http", "limits", "dispatch", "storage", *_LISTS}


class CascadeSettings(CascadeConfig):
    """A cascade, and what a plan that has lowered its threshold leaves for idle heavy models.

    Attributes:
        idle_threshold: for an image for which the heavy model stands idle, if it gives no more than
            ``idle_deferral_rate``; None for no other than all images'.
        idle_deferral_rate: None for any.
    """

    idle_threshold: float | None = None
    idle_deferral_rate: float | None = None


class Settings(Document):
    """The settings of a cell; API keys are in it as digests only.

    Where and with what processes run is not in it: such keys have their defaults, and those of
    workers are the file's, whatever they were started with.

    Attributes:
        api_keys: empty where anybody may call.
        given_version: the version that is not to follow from the content, where a plan has
            narrowed it.
    """

    api_keys: tuple[ApiKey, ...]
    cascades: tuple[CascadeSettings, ...] = ()
    given_version: str = ""

    @cached_property
    def version(self) -> str:
        """A digest, equal for equal settings however their file is written."""
        if self.given_version:
            return self.given_version
        keys = self.model_dump(mode="json", include={"api_keys"})
        text = json.dumps(keys | self.content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_VERSION_CHARS]

    def content(self) -> dict[str, Any]:
        """Return what is live, and what calls are checked with, as JSON has it; no API keys."""
        found: dict[str, Any] = {name: _live(getattr(self, name)) for name in _SINGLE}
        for name in _LISTS:
            found[name] = [part(one, "live", for_calls=True) for one in getattr(self, name)]
        return found

    def for_gateways(self) -> str:
        """Return what gateways are told, as JSON of a :class:`Document`; no API keys."""
        content = self.model_dump(mode="json", include=_FOR_GATEWAYS)
        keys = set(CascadeConfig.model_fields)
        content["cascades"] = [one.model_dump(mode="json", include=keys) for one in self.cascades]
        return json.dumps(content)


def settings_of(
    config: ClusterConfig,
    more_keys: Iterable[SecretStr] = (),
    kept_keys: tuple[ApiKey, ...] = (),
) -> Settings:
    """Return the settings in a configuration.

    Args:
        more_keys: API keys beside those of the configuration.
        kept_keys: those that stay in force where there is none, unless ``http.open`` is set.

    Raises:
        ConfigError: a key among the others is one of the configuration's under another name.
    """
    given = [key.entry for key in config.http.api_keys]
    given += [ApiKey.plain(key.get_secret_value()) for key in more_keys]
    try:
        # the same key may stand in the file and in the environment
        keys = check_distinct(given)
    except ValueError as error:
        raise ConfigError(f"http.api_keys: {error}") from None
    if not keys and not config.http.open:
        keys = kept_keys
    return Settings(
        api_keys=tuple(sorted(keys, key=lambda key: key.digest)),
        cascades=tuple(_cascade(one, config) for one in config.cascades),
        **{name: getattr(config, name) for name in _LISTS if name != "cascades"},
        **{name: _live(getattr(config, name)) for name in _SINGLE},
    )


def _live(section: Section) -> dict[str, Any]:
    return {key: value for key, value in part(section, "live").items() if key not in _KEYS}


def _cascade(cascade: CascadeConfig, config: Document) -> CascadeSettings:
    """Return a cascade that says where its curves are."""
    given = config.worker(DiscriminatorConfig, cascade.discriminator)
    curves = cascade.curves or given.calibration or given.model
    return CascadeSettings(**{**cascade.model_dump(), "curves": curves})
