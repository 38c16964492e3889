"""The service, the commands and the simulator import with the core dependencies alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# hides every installed module that the requirements do not bring, then imports the whole package
SCRIPT = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

unwanted = tuple(json.loads(sys.argv[1]))

def closure(name, extras, seen):
    key = (canonical(name), extras)
    if key in seen:
        return
    seen.add(key)
    for text in distribution(name).requires or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras):
            closure(need.name, ("", *sorted(need.extras)), seen)

needed = set()
closure("ray-cluster", ("",), needed)
brought = {name for name, _ in needed}
hidden = {
    module
    for module, owners in packages_distributions().items()
    if not brought & set(map(canonical, owners))
}
assert "pytest" in hidden and "torch" not in hidden, "the requirements were misread"

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
    *(f"ray_cluster.kernels.{file.parent.name}.triton" for file in KERNELS.glob("*/triton.py")),
)


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
