"""What commands write, and how they fail: one sentence on stderr and a code, never a traceback."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ray_cluster
from ray_cluster.errors import InvalidRequest, RayClusterError

DEFAULT_URL = "http://127.0.0.1:8000"
# where the command's option is not called as the API's parameter
_OPTION_BY_PARAM: Mapping[str, str] = {
    "num_inference_steps": "--steps",
    "partial_images": "--previews",
    "min_inference_steps": "--min-steps",
    "guidance_scale": "--guidance",
    "output_format": "--format",
    "output_compression": "--compression",
    "slo_s": "--slo",
    "image": "--edit",
    "images": "--edit",
    "feather_px": "--feather",
    "loras": "--lora",
    "controlnets": "--control",
    # of the command alone
    "like": "--like",
}

# what an extra brings, by the module that is missing without it
EXTRA_BY_MODULE: Mapping[str, str] = {
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


def fail(message: str) -> NoReturn:
    """Write an error to stderr and exit with code 1."""
    complain(message)
    raise typer.Exit(1)


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
        option = _OPTION_BY_PARAM.get((error.param or "").partition("[")[0])
        fail(error.message if option is None else f"{error.message} (option {option})")
    except RayClusterError as error:
        fail(str(error))


def needs_extra(module: str) -> str:
    """Say which extra of ray-cluster brings a module, and how to install it here."""
    root, extra = Path(ray_cluster.__file__).parents[1], EXTRA_BY_MODULE[module]
    if not (root / "pyproject.toml").is_file():
        return f"needs {module}: pip install 'ray-cluster[{extra}]'"
    # a checkout: no package index has it
    near = os.path.relpath(root)
    constraints = os.path.normpath(os.path.join(near, "constraints.txt"))
    options = f"-e {shlex.quote(f'{near}[{extra}]')} -c {shlex.quote(constraints)}"
    return f"needs {module}: {command('python')} -m pip install {options}"


def command(name: str = "ray-cluster") -> str:
    """Return the command by its name alone where PATH finds ours, else by its path."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not ours.is_file() or (found is not None and Path(found).samefile(ours)):
        return name
    near = os.path.relpath(ours)
    if near.startswith(os.pardir):
        return shlex.quote(str(ours))
    # a shell looks for a bare name in PATH only
    return shlex.quote(near if os.sep in near else os.path.join(os.curdir, near))


def jobs_command(action: str, job_id: str, base: str) -> str:
    """Return a command on a job of the service at ``base``."""
    text = f"{command()} jobs {action} {shlex.quote(job_id)}"
    return text if base == DEFAULT_URL else f"{text} --url {shlex.quote(base)}"
