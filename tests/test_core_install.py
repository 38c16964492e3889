"""The service, the commands and the simulator import with the core dependencies alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# hides every installed module that the requirements do not bring, then imports whole packages; then
# the same for an extra, in the process that has loaded the large ones
SCRIPT = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

imports = json.loads(sys.argv[1])

def closure(name, extras, seen):
    key = (canonical(name), extras)
    if key in seen:
        return
    seen.add(key)
    for text in distribution(name).requires or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras):
            closure(need.name, ("", *sorted(need.extras)), seen)

hidden = set()
owners_by_module = packages_distributions()

def hide_all_but(extra):
    needed = set()
    closure("ray-cluster", ("", extra), needed)
    brought = {name for name, _ in needed}
    hidden.clear()
    hidden.update(
        module
        for module, owners in owners_by_module.items()
        if not brought & set(map(canonical, owners))
    )
    assert "pytest" in hidden and "torch" not in hidden, "the requirements were misread"
    assert ("cv2" in hidden) != (extra == "training"), "the extra was misread"

class OnlyBrought(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in hidden:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyBrought
for extra, wanted, unwanted in imports:
    hide_all_but(extra)
    count = 0
    for name in wanted:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            if not module.name.startswith(tuple(unwanted)):
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
TRAINING = ("ray_cluster.training", "ray_cluster.quality")


# an extra, the packages that import with it, and what is left out of these
IMPORTS = (("", ("ray_cluster",), (*ELSEWHERE, *TRAINING)), ("training", TRAINING, ()))


@pytest.mark.timeout(600)
def test_everything_imports_with_what_is_declared() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(IMPORTS)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
