"""The service, the commands and the simulator import with the core dependencies alone."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import SHIPPED, files

ROOT = Path(__file__).resolve().parents[1]


def hidden_modules() -> set[str]:
    """Every installed module that the requirements do not bring."""
    from importlib.metadata import distribution, packages_distributions

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name as canonical

    seen = set()

    def close(name: str, extras: tuple[str, ...]) -> None:
        key = (canonical(name), extras)
        if key in seen:
            return
        seen.add(key)
        for text in distribution(name).requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras):
                close(need.name, ("", *sorted(need.extras)))

    close("ray-cluster", ("",))
    brought = {name for name, _ in seen}
    owners_by_module = packages_distributions().items()
    found = {name for name, owners in owners_by_module if not brought & set(map(canonical, owners))}
    assert "pytest" in found, "the requirements were misread"
    assert "torch" not in found, "the requirements were misread"
    return found


# imports the whole package where these are hidden
SCRIPT = f"""
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder

{inspect.getsource(hidden_modules)}
unwanted = tuple(json.loads(sys.argv[1]))
hidden = hidden_modules()

class OnlyBrought(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in hidden:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyBrought
package = importlib.import_module("ray_cluster")
count = 0
for module in pkgutil.walk_packages(package.__path__, "ray_cluster."):
    if not module.name.startswith(unwanted):
        importlib.import_module(module.name)
        count += 1
assert count > 10, count
"""
# what alembic, Python and a GPU's Triton load
ELSEWHERE = (
    "ray_cluster.jobs.migrations",
    "ray_cluster.cli.__main__",
    *(
        f"ray_cluster.kernels.{file.parent.name}.triton"
        for file in (ROOT / "kernels").glob("*/triton.py")
    ),
)


def test_what_modules_name_at_their_top_is_declared() -> None:
    named = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
    names = {
        (path.as_posix(), name)
        for path in files(ROOT)
        if path.parts[0] in SHIPPED and path.name != "triton.py"
        for name in named.findall((ROOT / path).read_text())
    }
    assert {"ray", "torch", "diffusers"} <= {name for _, name in names}
    hidden = hidden_modules()
    assert {(path, name) for path, name in names if name in hidden} == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_imports_with_what_is_declared() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(ELSEWHERE)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
