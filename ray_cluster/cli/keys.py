"""``ray-cluster keys``: makes API keys and their entries for a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

keys = typer.Typer(
    help="API keys: make one, or digest one that there is. Nothing is stored.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="The client: who owns what is sent with the key.")],
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="use: make images; loras: register and remove LoRAs; operate: pause plans, "
            "priorities above 0. Repeatable. Default: use."
        ),
    ] = None,
) -> None:
    """Make a key: print it, and its entry for http.api_keys, which holds a digest only.

    A client may have several keys: to replace one, add the entry of the new key under the same
    name, and remove the old one later.

    [bold]Examples[/bold]

      ray-cluster keys new shop

      ray-cluster keys new deploy --role loras --role operate
    """
    import secrets

    from ray_cluster.cli.output import plain_errors, stdout

    with plain_errors():
        key = f"rc-{secrets.token_urlsafe(32)}"
        entry = _entry(name, key, role or ["use"])
        out = stdout()
        out.print(f"# the key of {name}; it is shown this once\n{key}\n", markup=False)
        out.print(f"# its entry in http.api_keys\n- {entry}", markup=False)


@keys.command()
def digest() -> None:
    """Read a key from stdin, and print its digest as entries of http.api_keys have it.

    On a terminal it asks for the key and does not show it. A line's end is not part of the key.

    [bold]Examples[/bold]

      ray-cluster keys digest < key.txt
    """
    import sys

    from ray_cluster.cli.output import fail, stdout
    from ray_cluster.config.sections.keys import KEY_PREFIX, key_digest

    is_asked = sys.stdin.isatty()
    text = typer.prompt("Key", hide_input=True, err=True) if is_asked else sys.stdin.read()
    key = text.rstrip("\r\n")
    if not key.strip() or not key.isprintable():
        fail("stdin must have one API key in one line, which is not empty")
    stdout().print(f"{KEY_PREFIX}{key_digest(key)}", markup=False)


def _entry(name: str, key: str, roles: list[str]) -> str:
    """Return an entry as YAML in one line; ConfigError for a wrong name or role."""
    import json

    from pydantic import ValidationError

    from ray_cluster.config.sections.keys import KeyConfig
    from ray_cluster.config.validation_errors import describe
    from ray_cluster.errors import ConfigError

    try:
        entry = KeyConfig.of(name, key, roles)
    except ValidationError as error:
        raise ConfigError(describe(error, KeyConfig)) from None
    # a name may look like a number
    digest = json.dumps(entry.key.get_secret_value())
    return f"{{name: {json.dumps(name)}, key: {digest}, roles: [{', '.join(entry.roles)}]}}"
