"""Every field and value that the installed openai client knows is honoured, accepted or refused."""

from __future__ import annotations

from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from openai.types import image_generate_params

from tests.api.checks import URL, error_of
from tests.fakes import FakeDispatcherClient

# field -> values that are taken; everything else is refused by name
HONOURED: dict[str, tuple[Any, ...]] = {
    "prompt": ("a red circle",),
    "model": ("shapes",),
    "n": (1, 10),
    "size": ("auto", "64x64", "96x32", "256x256"),
    "response_format": ("b64_json", "url"),
    "output_format": ("png", "jpeg", "webp"),
    "stream": (True, False),
}
CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "quality": ("auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"),
    "style": ("vivid", "natural"),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "user": ("someone", ""),
    "safety_identifier": ("someone", ""),
    "partial_images": (0,),
    # with png, which is the default
    "output_compression": (100,),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "style": ("anime", "", 7),
    "complexity": ("low",),
    "svg": ({"model": "x"}, {}),
    "frame_count": (9,),
    "frame_duration_ms": (200,),
    "input_fidelity": ("high", "low"),
    "image": ("iVBORw0KGgo=",),
    "mask": ("iVBORw0KGgo=",),
    "markup": ([],),
    # with png, which is the default
    "output_compression": (0, 50, 99),
    "output_format": ("gif", "svg"),
    "background": ("transparent",),
    "moderation": ("high",),
    # without a stream
    "partial_images": (1, 3),
    "quality": ("ultra", "", 1),
    "size": ("1024x1024",),
    "n": (11,),
}


def documented() -> dict[str, Any]:
    """The types of the fields in the installed client, of whatever version."""
    params = image_generate_params.ImageGenerateParams
    variants = get_args(params) or (params,)
    fields: dict[str, Any] = {}
    for variant in variants:
        for name, hint in get_type_hints(variant).items():
            fields[name] = Union[fields[name], hint] if name in fields else hint  # noqa: UP007
    return fields


def literals(hint: Any) -> list[Any]:
    """All values of the literal types inside a type."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for inner in get_args(hint) for value in literals(inner)]


def cases(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def literal_cases() -> list[tuple[str, Any]]:
    return [(name, value) for name, hint in documented().items() for value in literals(hint)]


def test_no_documented_field_is_forgotten() -> None:
    assert documented().keys() <= HONOURED.keys() | CHANGES_NOTHING.keys() | REFUSED.keys()


async def post(http: httpx.AsyncClient, name: str, value: Any) -> httpx.Response:
    return await http.post(URL, json={"prompt": "a red circle", name: value})


@pytest.mark.parametrize(("name", "value"), cases(HONOURED) + cases(CHANGES_NOTHING))
async def test_it_is_taken(http: httpx.AsyncClient, name: str, value: Any) -> None:
    response = await post(http, name, value)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("name", "value"), cases(CHANGES_NOTHING))
async def test_what_changes_nothing_changes_nothing(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, value: Any
) -> None:
    plain = {"prompt": "a red circle", "seed": 1}
    first = (await http.post(URL, json=plain)).json()
    second = (await http.post(URL, json={**plain, name: value})).json()
    assert first == second
    # what was used, whatever was asked for
    assert (second["quality"], second["background"]) == ("auto", "opaque")
    assert (second["output_format"], second["size"]) == ("png", "64x64")


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
async def test_it_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, value: Any
) -> None:
    response = await post(http, name, value)
    assert response.status_code == 400
    assert error_of(response)["param"] == name
    assert repr(name) in error_of(response)["message"]
    assert fake.offered == []


@pytest.mark.parametrize(("name", "value"), literal_cases())
async def test_every_documented_value_has_a_place(
    http: httpx.AsyncClient, name: str, value: Any
) -> None:
    response = await post(http, name, value)
    if name == "model":
        # names of OpenAI's own models
        assert response.status_code == 404
    elif response.status_code != 200:
        assert response.status_code == 400
        assert error_of(response)["param"] == name
    else:
        assert value in (*HONOURED.get(name, ()), *CHANGES_NOTHING.get(name, ()))
