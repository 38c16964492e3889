"""The service, the commands and the simulator import with the core dependencies alone."""

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# hides every installed module that the given requirements do not bring, then imports whole packages
SCRIPT = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

extra, wanted, unwanted = sys.argv[1], sys.argv[2].split(), tuple(sys.argv[3].split())

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
closure("ray-cluster", ("", extra), needed)
brought = {name for name, _ in needed}
hidden = {
    module
    for module, owners in packages_distributions().items()
    if not brought & set(map(canonical, owners))
}
assert "pytest" in hidden and "torch" not in hidden, "the requirements were misread"
assert ("cv2" in hidden) != (extra == "training"), "the extra was misread"

class OnlyBrought(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in hidden:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyBrought
count = 0
for name in wanted:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
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
TRAINING = ("ray_cluster.training", "ray_cluster.quality")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extra", "wanted", "unwanted"),
    [("", ("ray_cluster",), (*ELSEWHERE, *TRAINING)), ("training", TRAINING, ())],
    ids=["core", "training"],
)
def test_everything_imports_with_what_is_declared(
    extra: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, extra]
    done = subprocess.run(
        [*command, " ".join(wanted), " ".join(unwanted)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
