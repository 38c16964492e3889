"""Python, the packages, and whether they fit together."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ray_cluster.cli.checks import Finding, ok, problem, warning

_PACKAGE = "ray-cluster"
# newer ones are not excluded, but not tested
_TRIED_PYTHONS = ((3, 11), (3, 12))
_IMPORT_ERRORS = (ImportError, RuntimeError, OSError, AttributeError)


def check_software() -> Iterator[Finding]:
    """Yield findings about Python and the packages."""
    version = platform.python_version()
    if sys.version_info[:2] in _TRIED_PYTHONS:
        yield ok("Python", version)
    else:
        advice = "3.11 and 3.12 are tried; use one of them if something fails"
        yield warning("Python", version, advice)
    yield _torch()
    yield _torchvision()
    yield _ray()
    yield _requirements()
    constraints = Path(__file__).parents[3] / "constraints.txt"
    if constraints.is_file():
        yield _tried_versions(constraints)


def _torch() -> Finding:
    try:
        import torch
    except _IMPORT_ERRORS as error:
        return problem("torch", f"cannot be imported: {error}", "install torch again")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return ok("torch", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _torchvision() -> Finding:
    """Find a torchvision that does not match torch: transformers and peft break on it."""
    if find_spec("torchvision") is None:
        return ok("torchvision", "not installed; it is not needed")
    try:
        module = importlib.import_module("torchvision")
    except _IMPORT_ERRORS as error:
        return problem(
            "torchvision",
            f"does not match torch ({str(error).splitlines()[0]}); transformers, peft and "
            "diffusers break on it",
            "pip uninstall torchvision, or install it from the same index as torch",
        )
    return ok("torchvision", str(module.__version__))


def _ray() -> Finding:
    try:
        found = installed_version("ray")
    except PackageNotFoundError:
        return problem("Ray", "not installed", "pip install 'ray[serve]'; the engine runs without")
    missing = [name for name in ("fastapi", "uvicorn", "aiohttp") if find_spec(name) is None]
    if missing:
        return problem("Ray", f"{found} without {', '.join(missing)}", "pip install 'ray[serve]'")
    return ok("Ray", found)


def _requirements() -> Finding:
    """Compare what is installed with what our packages require, like ``pip check``."""
    try:
        distribution(_PACKAGE)
    except PackageNotFoundError:
        return warning(
            "packages",
            f"{_PACKAGE} itself is not installed, so its requirements are not known",
            "pip install -e . in its folder, or make venv",
        )
    seen: set[str] = set()
    wrong = sorted(set(_unmet(_PACKAGE, seen)))
    if wrong:
        return problem("packages", "; ".join(wrong), "pip install the named versions")
    return ok("packages", f"{len(seen)} packages fit together")


def _unmet(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the requirements of a package and its requirements that are not met."""
    seen.add(canonicalize_name(name))
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = installed_version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name} is missing ({name} needs it)"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found}, {name} needs {requirement.specifier}"
        if canonicalize_name(requirement.name) not in seen:
            yield from _unmet(requirement.name, seen)


def _tried_versions(constraints: Path) -> Finding:
    """Compare with the versions that the tests run with."""
    different = []
    for line in constraints.read_text(encoding="utf-8").splitlines():
        name, _, wanted = line.partition("==")
        if not wanted or name.startswith("#"):
            continue
        try:
            found = installed_version(name)
        except PackageNotFoundError:
            # an extra that was not asked for
            continue
        if found.partition("+")[0] != wanted:
            different.append(f"{name} {found} (tried: {wanted})")
    if different:
        return warning(
            "tried versions",
            ", ".join(different),
            "if something fails, install with -c constraints.txt",
        )
    return ok("tried versions", "as in constraints.txt")
