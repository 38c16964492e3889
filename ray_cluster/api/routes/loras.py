"""``/v1/loras``: registers, lists and removes the LoRAs of the cell."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.access.auth import caller_of
from ray_cluster.api.advice import wrong
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import ApiError, model_not_found, not_found
from ray_cluster.api.input.bounded_body import BodyLimit, BodyMemory, read_object
from ray_cluster.api.input.schemas import LoraRegistration
from ray_cluster.api.input.validation import check_query, validate_as
from ray_cluster.api.output.error_answers import from_invalid
from ray_cluster.api.output.resource_schemas import LoraList, LoraResponse, lora_reply
from ray_cluster.api.routes.files import url_of
from ray_cluster.api.routes.models import lora_pages
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.loras import LORA_NAME
from ray_cluster.errors import InvalidRequest
from ray_cluster.protocol.dispatcher import LoraCalls
from ray_cluster.protocol.loras import Lora, LoraAdded, LoraStatus

MAX_LORA_PAGE = 1000
_LIST_PARAMETERS = ("limit", "after")


class LorasEndpoint:
    """The registry of LoRAs, which all callers share."""

    def __init__(
        self, client: LoraCalls, catalog: Catalog, settings: CurrentSettings, memory: BodyMemory
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._memory = memory

    async def create(self, request: Request, response: Response) -> LoraResponse:
        """Register a LoRA under a name. Its file is fetched when a call first needs it.

        The same registration sent again changes nothing (status 200 instead of 201). Another file
        takes another name, or the name once `DELETE` has set it free.
        """
        limits = self._settings.latest.limits
        limit = BodyLimit.of_json(limits)
        with self._memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, take=take)
        wanted = _lora(validate_as(LoraRegistration, body, {}), caller_of(request))
        await self._check_base(wanted.base)
        added = await self._client.add_lora(wanted)
        if added.refused is not None:
            raise self._refused(wanted, added)
        assert added.status is not None, "what is not refused is registered"
        if not added.is_new:
            response.status_code = HTTPStatus.OK
        response.headers["Location"] = url_of(request, f"/v1/loras/{quote(wanted.name)}")
        return lora_reply(added.status)

    async def retrieve(self, name: str) -> LoraResponse:
        """Describe a LoRA: its state, its size, where it is, how often it was used."""
        if LORA_NAME.fullmatch(name) is None:
            raise _not_found(name)
        lookup = await self._client.find_loras((name,))
        if (status := lookup.found.get(name)) is None:
            raise _not_found(name, lookup.near.get(name, ()))
        return lora_reply(status)

    async def remove(self, name: str) -> LoraResponse:
        """Remove a LoRA: no call may name it from now on, and images accepted before are made."""
        status = None
        if LORA_NAME.fullmatch(name) is not None:
            status = await self._client.remove_lora(name)
        if status is None:
            raise _not_found(name)
        return lora_reply(status)

    async def _check_base(self, base: str) -> None:
        profiles = await self._catalog.refresh()
        if any(one.name == base for one in self._catalog.cascades):
            what = f"names the cascade {base!r}, which is no model of its own"
            raise wrong("base", what, "part of cascade")
        if base not in self._models:
            raise model_not_found(base, self._models, "base")
        if base in profiles and profiles[base].engine == "diffusers":
            what = f"names {base}, which is run call by call and takes no LoRAs"
            raise wrong("base", what, "of steps")

    @property
    def _models(self) -> list[str]:
        """All models, without the cascades, which have none of their own."""
        cascades = {one.name for one in self._catalog.cascades}
        return [name for name in self._catalog.known if name not in cascades]

    def _refused(self, wanted: Lora, added: LoraAdded) -> ApiError:
        match added.refused:
            case "unknown_base":
                return model_not_found(wanted.base, self._models, "base")
            case "too_many" | "too_many_own" | "too_many_pinned" | "too_many_own_pinned":
                return _too_many(added)
            case "source_not_allowed":
                return from_invalid(InvalidRequest(added.reason, "source", "source_not_allowed"))
        return _exists(wanted, added)

    async def list(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LORA_PAGE)] = 20,
        after: Annotated[str, Query(max_length=100)] = "",
    ) -> LoraList:
        """List LoRAs by name; `after` is the `last_id` of the page before."""
        check_query(request, _LIST_PARAMETERS)
        found: list[LoraStatus] = []
        async for page in lora_pages(self._client, after, limit + 1):
            found += page
        data = [lora_reply(one) for one in found[:limit]]
        return LoraList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )


def _lora(fields: LoraRegistration, owner: str) -> Lora:
    _check_source(fields.source)
    return Lora(
        lora_id="",
        name=fields.name,
        base=fields.base,
        source=fields.source,
        sha256=fields.sha256 or "",
        is_pinned=bool(fields.pinned),
        owner=owner,
    )


def _check_source(source: str) -> None:
    """Refuse what no store can fetch, and what others must not read."""
    if not source.isprintable() or source.strip() != source:
        raise wrong("source", "holds control characters, or spaces around it", "remove")
    try:
        has_secret = "@" in urlsplit(source).netloc
    except ValueError:
        raise wrong("source", f"is no URL: {source[:100]!r}", "source") from None
    if has_secret:
        what = "holds a user or a password, which GET /v1/loras would show"
        raise wrong("source", what, "credentials")


def _too_many(added: LoraAdded) -> ApiError:
    is_pin = added.refused in ("too_many_pinned", "too_many_own_pinned")
    is_own = added.refused in ("too_many_own", "too_many_own_pinned")
    what, key = ("pinned LoRAs", "loras.max_pinned") if is_pin else ("LoRAs", "loras.max_loras")
    whose, setting = ("you have", f"loras.client_share of {key}") if is_own else ("there are", key)
    advice = "; or leave 'pinned' out" if is_pin else ""
    return ApiError(
        HTTPStatus.CONFLICT,
        f"No more {what} are registered: {whose} {added.reason}, as many as allowed ({setting}). "
        f"Remove some with DELETE /v1/loras/{{name}}{advice}.",
        code="too_many_pinned_loras" if is_pin else "too_many_loras",
        param="pinned" if is_pin else None,
    )


def _exists(wanted: Lora, added: LoraAdded) -> ApiError:
    assert added.status is not None, "a name that exists has a LoRA"
    there, names = added.status.lora, ("base", "source", "sha256", "is_pinned")
    others = [one for one in names if getattr(there, one) != getattr(wanted, one)]
    differ = ", ".join(others).replace("is_pinned", "pinned")
    return ApiError(
        HTTPStatus.CONFLICT,
        f"The LoRA {wanted.name!r} is registered already, with another {differ}. Remove that one "
        "first, or choose another name.",
        code="lora_exists",
        param="name",
    )


def _not_found(name: str, near: tuple[str, ...] = ()) -> ApiError:
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return not_found(
        f"There is no LoRA {name[:100]!r}.{meant} GET /v1/loras lists all.",
        "lora_not_found",
        "name",
    )
