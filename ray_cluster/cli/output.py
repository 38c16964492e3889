"""What commands write, and how they fail: one sentence on stderr and a code, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_cluster.errors import InvalidRequest, RayClusterError

# where the command's option is not called as the API's parameter
OPTION_BY_PARAM: Mapping[str, str] = {
    "num_inference_steps": "--steps",
    "partial_images": "--previews",
    "min_inference_steps": "--min-steps",
    "guidance_scale": "--guidance",
    "output_format": "--format",
    "output_compression": "--compression",
    "slo_s": "--slo",
    "image": "--like",
}

# what an extra brings, by the module that is missing without it
EXTRA_BY_MODULE: Mapping[str, str] = {
    "cv2": "training",
    "matplotlib": "plots",
    "sklearn": "baselines",
}


def stdout() -> Console:
    """Return a console for results."""
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Return a console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Write a table within the console's width: its cells wrap, and lose nothing."""
    for column in table.columns:
        # a word that is wider than its column is broken
        column.overflow = "fold"
    console.print(table, soft_wrap=False)


def warn(message: str, console: Console | None = None) -> None:
    """Write a warning to stderr, or to the console on which something is live."""
    # in one piece: what is live is drawn again after each
    text = Text.assemble(("warning:", "bold yellow"), " ", message)
    (console or stderr()).print(text)


def complain(message: str) -> None:
    """Write an error to stderr."""
    stderr().print(Text.assemble(("error:", "bold red"), " ", message))


def fail(message: str, code: int = 1) -> NoReturn:
    """Write an error to stderr and leave with ``code``."""
    complain(message)
    raise typer.Exit(code)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of ray-cluster, and missing extras, into one sentence and exit code 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_BY_MODULE:
            raise
        fail(f"this {needs_extra(module)}")
    except InvalidRequest as error:
        fail(with_option(error.message, error.param))
    except RayClusterError as error:
        fail(str(error))


def needs_extra(module: str) -> str:
    """Say which extra of ray-cluster brings a module."""
    return f"needs {module}: pip install 'ray-cluster[{EXTRA_BY_MODULE[module]}]'"


def with_option(message: str, param: str | None) -> str:
    """Return the message with the option that sets the API's parameter, if its name differs."""
    option = OPTION_BY_PARAM.get(param or "")
    return message if option is None else f"{message} (option {option})"
