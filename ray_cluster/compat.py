"""What Ray, diffusers, transformers and accelerate do not promise to keep: their private names.

Tried with the versions of ``constraints.txt``; ``tests/test_compat.py`` fails where another release
has none of a name. A library is imported when a function is called: its callers have it anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def ray_addresses() -> list[str]:
    """Return the addresses of the Rays on this machine, through which ``ray.init`` looks."""
    from ray._private import services

    return sorted(services.find_gcs_addresses())


def dashboard_url() -> str | None:
    """Return host and port of the dashboard of the cluster that this process is connected to."""
    from ray._private import services

    return services.get_webui_url_from_internal_kv() or None


def dashboard_headers() -> dict[str, str]:
    """Return the headers that Ray's dashboard wants of callers where it authenticates them."""
    from ray._private.authentication import http_token_authentication

    headers: dict[str, str] = http_token_authentication.get_auth_headers_if_auth_enabled({})
    return headers


def serve_controller() -> Any:
    """Return the actor that is Ray Serve's controller; ValueError if there is none."""
    import ray
    from ray.serve._private import constants

    return ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)


def put_first(name: str, value: str) -> str:
    """Write a value into Ray's key-value store unless there is one; return what is there now.

    It lasts as long as Ray does.
    """
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(name, value, overwrite=False)
    return str(internal_kv._internal_kv_get(name), "ascii")


def lora_components(pipeline: Any) -> Collection[str]:
    """Return the components of a diffusers pipeline class that LoRAs may change."""
    names: Collection[str] = pipeline._lora_loadable_modules
    return names


def rename_old_weights(model: Any, stored: dict[str, Tensor]) -> None:
    """Give the weights of a diffusers model in one file the names that it has today, in place."""
    model._fix_state_dict_keys_on_load(stored)


def has_original_names(model: Any, stored: Collection[str]) -> bool:
    """Whether weights have the names of their model's authors in place of diffusers'."""
    from diffusers.loaders import single_file_model

    own = dict.fromkeys(model.state_dict())
    return bool(
        single_file_model._should_convert_state_dict_to_diffusers(own, dict.fromkeys(stored))
    )


def float32_modules(kind: Any, *, is_strict: bool = False) -> frozenset[str]:
    """Return the modules that a class of diffusers or transformers keeps in float32.

    Args:
        is_strict: those of transformers alone that are kept in place of any format.
    """
    name = "_keep_in_fp32_modules_strict" if is_strict else "_keep_in_fp32_modules"
    found = getattr(kind, name, None) or ()
    return frozenset([found] if isinstance(found, str) else found)


def is_offloaded(layer: nn.Module) -> bool:
    """Whether accelerate brings a layer's weights to its device when it is called."""
    return hasattr(layer, "_hf_hook")


def processor_without_torchvision(name: str) -> Any:
    """Return a class of transformers' processors as far as it goes without torchvision.

    Which does not stand beside torch for CPUs. Videos need it, and Pixtral's pictures: of that one
    texts are left. None for a class that does without it anyway.
    """
    import transformers

    kind: Any = getattr(transformers, name, None)

    def of_texts(self: Any, tokenizer: Any = None, chat_template: str | None = None) -> None:
        transformers.ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template)

    if "torchvision" in getattr(kind, "_backends", ()):
        return type(name, (transformers.ProcessorMixin,), {"__init__": of_texts})
    parts: list[str] = getattr(kind, "get_attributes", list)()
    own = classmethod(lambda _kind: [one for one in parts if one != "video_processor"])
    return type(name, (kind,), {"get_attributes": own}) if "video_processor" in parts else None
