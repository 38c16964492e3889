"""The settings: the part of a configuration that changes while the service runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar

from pydantic import SecretStr, ValidationError

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorTuning
from ray_cluster.config.sections.cell_wide import (
    DispatchSettings,
    LimitsConfig,
    Section,
    StorageSettings,
)
from ray_cluster.config.sections.controller import ControlSettings
from ray_cluster.config.sections.controlnets import ControlNetConfig, ControlNetTuning
from ray_cluster.config.sections.http import HttpSettings
from ray_cluster.config.sections.keys import ApiKey, check_distinct
from ray_cluster.config.sections.loras import LoraSettings
from ray_cluster.config.sections.pools import PoolArguments, PoolConfig, PoolTuning
from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError

PartT = TypeVar("PartT", bound=Section)

_VERSION_CHARS = 12


class PoolSettings(PoolTuning):
    """The settings of one pool, and the arguments of it that calls are validated with."""

    name: str
    model_name: str
    max_num_inference_steps: int


class DiscriminatorSettings(DiscriminatorTuning):
    """The settings of one discriminator."""

    name: str


class ControlNetSettings(ControlNetTuning):
    """The settings of one ControlNet, and what calls that name it are validated with."""

    name: str
    bases: tuple[str, ...]
    is_service: bool


class CascadeSettings(CascadeConfig):
    """A cascade, and what a plan that has lowered its threshold leaves for idle heavy models.

    Attributes:
        idle_threshold: for an image for which the heavy model stands idle, if it gives no more than
            ``idle_deferral_rate``; None for no other than all images'.
        idle_deferral_rate: None for any.
    """

    idle_threshold: float | None = None
    idle_deferral_rate: float | None = None


class Settings(Section):
    """The settings of a cell; API keys are in it as digests only.

    Attributes:
        api_keys: empty where anybody may call.
        given_version: the version that is not to follow from the content, where a plan has
            narrowed it.
    """

    api_keys: tuple[ApiKey, ...]
    http: HttpSettings
    limits: LimitsConfig
    dispatch: DispatchSettings
    storage: StorageSettings
    pools: tuple[PoolSettings, ...]
    discriminators: tuple[DiscriminatorSettings, ...] = ()
    cascades: tuple[CascadeSettings, ...] = ()
    loras: LoraSettings = LoraSettings()
    controlnets: tuple[ControlNetSettings, ...] = ()
    control: ControlSettings = ControlSettings()
    given_version: str = ""

    @cached_property
    def version(self) -> str:
        """A digest, equal for equal settings however their file is written."""
        if self.given_version:
            return self.given_version
        text = self.model_dump_json(exclude={"given_version"})
        return hashlib.sha256(text.encode()).hexdigest()[:_VERSION_CHARS]

    def pool(self, name: str) -> PoolSettings | None:
        """Return the settings of a pool; None for one that is not in the document."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def discriminator(self, name: str) -> DiscriminatorSettings | None:
        """Return the settings of a discriminator; None for one that is not in the document."""
        return next((one for one in self.discriminators if one.name == name), None)

    def controlnet(self, name: str) -> ControlNetSettings | None:
        """Return the settings of a ControlNet; None for one that is not in the document."""
        return next((one for one in self.controlnets if one.name == name), None)


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
        http=part_of(config.http, HttpSettings),
        limits=config.limits,
        dispatch=part_of(config.dispatch, DispatchSettings),
        storage=part_of(config.storage, StorageSettings),
        pools=tuple(_pool_settings(pool) for pool in config.pools),
        discriminators=tuple(part_of(one, DiscriminatorSettings) for one in config.discriminators),
        cascades=tuple(_cascade(one, config) for one in config.cascades),
        loras=part_of(config.loras, LoraSettings),
        controlnets=tuple(_controlnet_settings(one) for one in config.controlnets),
        control=part_of(config.control, ControlSettings),
    )


def pool_config(arguments: PoolArguments, tuning: PoolTuning | None) -> PoolConfig:
    """Return the whole configuration of a pool that was started with these arguments.

    Args:
        tuning: None for a pool that is not in the document: it gets the defaults.

    Raises:
        ConfigError: the settings do not suit the arguments: the file was changed in both.
    """
    tuning = tuning or PoolTuning()
    try:
        return PoolConfig(**arguments.model_dump(), **tuning.model_dump())
    except ValidationError as error:
        raise ConfigError(f"pool {arguments.name}: {describe(error, PoolConfig)}") from error


def _cascade(cascade: CascadeConfig, config: ClusterConfig) -> CascadeSettings:
    """Return a cascade that says where its curves are."""
    given = config.discriminator(cascade.discriminator)
    curves = cascade.curves or given.calibration or given.model
    return CascadeSettings(**{**cascade.model_dump(), "curves": curves})


def _controlnet_settings(one: ControlNetConfig) -> ControlNetSettings:
    return ControlNetSettings(
        name=one.name,
        bases=one.bases,
        is_service=one.is_service,
        **one.model_dump(include=set(ControlNetTuning.model_fields)),
    )


def _pool_settings(pool: PoolConfig) -> PoolSettings:
    return PoolSettings(
        name=pool.name,
        model_name=pool.model_name,
        max_num_inference_steps=pool.max_num_inference_steps,
        **pool.model_dump(include=set(PoolTuning.model_fields)),
    )


def part_of(section: Section, kind: type[PartT]) -> PartT:
    """Return the fields of a section that another kind of section has."""
    return kind.model_validate(section.model_dump(include=set(kind.model_fields)))
