"""The layout's rules hold in every file, and each rule is seen to fire on a planted breach."""

import gc
import os
from pathlib import Path

import pytest

from tests.architecture import (
    BUDGET,
    LINKED,
    Breach,
    Source,
    check,
    files,
    full_folders,
    load,
    over_budget,
    route,
)

ROOT = Path(__file__).resolve().parent.parent


# layers, and what no chain of imports may lead them to
APART = [
    ("engine", "simulator"),
    ("simulator", "engine"),
    ("engine", "ray"),
    ("engine", "fastapi"),
    ("simulator", "ray"),
    ("simulator", "torch"),
]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    # a million objects that all stay: a third of the time would go into looking for garbage
    gc.disable()
    try:
        return [load(ROOT, path) for path in files(ROOT)]
    finally:
        gc.enable()


def test_every_file_keeps_the_rules(sources: list[Source]) -> None:
    breaches = [breach for source in sources for breach in check(source)]
    for start, goal in APART:
        if chain := route(sources, start, goal):
            said = f"{start} reaches {goal}: {' -> '.join(chain)}"
            breaches.append(Breach(chain[0], 1, "route", said))
    assert not breaches, "\n" + "\n".join(map(str, breaches))
    assert not (full := full_folders(files(ROOT))), full
    assert not (over := over_budget(sources)), "\n".join(over)


@pytest.mark.parametrize("folder", LINKED)
def test_linked_folder_has_no_init_and_a_relative_link(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/__init__.py would hide a package of that name (Hugging Face has `kernels`)"
    )
    assert os.readlink(ROOT / "ray_cluster" / folder) == f"../{folder}"


def test_every_file_is_seen_once(sources: list[Source]) -> None:
    modules = [source.module for source in sources]
    assert "ray_cluster" in modules
    assert "tests.test_architecture" in modules
    assert len(modules) == len(set(modules))


def test_a_room_over_its_budget_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(tmp_path, "policies/a.py", "x = 1\n" * 3)
    found = [load(tmp_path, path) for path in files(tmp_path)]
    monkeypatch.setitem(BUDGET, "policies", 3)
    assert over_budget(found) == []
    monkeypatch.setitem(BUDGET, "policies", 2)
    assert over_budget(found) == ["policies: 3 lines, at most 2"]


def test_a_full_folder_is_found() -> None:
    paths = [Path(f"policies/steps/p{number}.py") for number in range(13)]
    assert full_folders([*paths[:12], Path("policies/steps/__init__.py")]) == []
    assert full_folders(paths) == ["policies/steps: 13 files"]


# path, code, the rule that must fire (None: the file is clean)
PLANTED = [
    ("policies/a.py", "import torch", "direction"),
    ("policies/a.py", "import ray", "direction"),
    ("policies/a.py", "import pandas", "direction"),
    ("policies/a.py", "from ray_cluster.kernels.norm import x", "direction"),
    ("policies/a.py", "from ray_cluster.config.loading import Config", "direction"),
    ("policies/a.py", "from ray_cluster import engine", "direction"),
    ("policies/a.py", "def f(load):\n    load.import_module('torch')", "direction"),
    ("policies/a.py", "import time", "purity"),
    ("policies/a.py", "from time import monotonic", "purity"),
    ("policies/a.py", "import random", "purity"),
    ("policies/a.py", "import datetime", "purity"),
    ("policies/a.py", "from pathlib import Path", "purity"),
    ("policies/a.py", "import os.path", "purity"),
    ("policies/a.py", "import numpy as np\nx = np.random.default_rng()", "purity"),
    ("policies/a.py", "from numpy.random import default_rng", "purity"),
    ("policies/a.py", "def f(p):\n    return open(p)", "purity"),
    ("policies/a.py", "import numpy as np\ndef f(rng: np.random.Generator): ...", None),
    ("policies/a.py", "from ortools.sat.python import cp_model\nimport scipy, sklearn, math", None),
    ("policies/a.py", "from ray_cluster.policies.types import Plan", None),
    ("kernels/norm/reference.py", "import diffusers", "direction"),
    ("kernels/norm/reference.py", "from ray_cluster.policies.types import x", "direction"),
    ("kernels/norm/reference.py", "import torch, triton, numpy, math, time", None),
    ("kernels/norm/triton.py", "def f():\n" + "    x = 1\n" * 90, None),
    ("ray_cluster/engine/a.py", "from ray_cluster.simulator.a import x", "direction"),
    ("ray_cluster/engine/a.py", "from ray_cluster.deployments.app import x", "direction"),
    ("ray_cluster/engine/a.py", "from ray import serve", "direction"),
    ("ray_cluster/engine/a.py", "def f():\n    from fastapi import FastAPI", "direction"),
    ("ray_cluster/engine/a.py", "from ray_cluster.api.input.schemas import x", "direction"),
    ("ray_cluster/api/a.py", "import ray", "direction"),
    ("ray_cluster/api/a.py", "from fastapi import Request\nimport pydantic", None),
    ("ray_cluster/engine/a.py", "import torch\nfrom ray_cluster.policies.types import x", None),
    ("ray_cluster/simulator/a.py", "import ray_cluster.engine.step", "direction"),
    ("ray_cluster/dispatch/a.py", "from ray_cluster.jobs.store import x", "direction"),
    ("ray_cluster/replica/a.py", "from ray_cluster.dispatch.core import x", "direction"),
    ("ray_cluster/protocol/a.py", "from ray_cluster.engine.step import x", "direction"),
    ("ray_cluster/storage/a.py", "from ray_cluster.protocol.leases import x", "direction"),
    ("ray_cluster/config/a.py", "from ray_cluster.models.sizes import x", "direction"),
    ("ray_cluster/engine/a.py", "from ray_cluster.quality.edges import x", "direction"),
    ("ray_cluster/quality/a.py", "from recipes.runs import x", "direction"),
    ("ray_cluster/protocol/a.py", "from ray_cluster.observability.logs import x", None),
    ("ray_cluster/blobs.py", "x = 1", "rooms"),
    ("ray_cluster/attic/a.py", "x = 1", "rooms"),
    ("ray_cluster/errors.py", "x = 1", None),
    ("ray_cluster/simulator/a.py", "from ray_cluster.dispatch.core import Dispatch", None),
    ("deployments/a.py", "from ray._private import services", "private"),
    ("ray_cluster/engine/a.py", "from diffusers.utils import _hidden", "private"),
    ("ray_cluster/compat.py", "def f():\n    from ray._private import services", None),
    ("ray_cluster/dispatch/a.py", "import ray.serve", "direction"),
    ("ray_cluster/quality/a.py", "from ray_cluster.cli import main", "direction"),
    ("ray_cluster/__init__.py", "from ray_cluster.deployments.app import x", "direction"),
    ("deployments/a.py", "from ray_cluster.cli import main", "direction"),
    ("deployments/a.py", "import ray\nfrom ray_cluster.engine.step import x", None),
    ("ray_cluster/cli/a.py", "import ray\nfrom ray_cluster.deployments.app import x", None),
    ("ray_cluster/cli/__main__.py", "from ray_cluster.cli import main", None),
    ("ray_cluster/observability/a.py", "from . import config", "names"),
    ("ray_cluster/observability/a.py", "from policies.types import x", "names"),
    ("tests/test_a.py", "import kernels", "names"),
    ("benchmarks/a.py", "from deployments.app import x", "names"),
    ("ray_cluster/observability/a.py", "import os\nx = os.environ.get('A')", "environment"),
    ("deployments/a.py", "import os\nos.environ['A'] = '1'", "environment"),
    ("kernels/norm/a.py", "from os import getenv", "environment"),
    ("ray_cluster/config/loading.py", "import os\nx = os.environ.get('A')", None),
    ("tests/test_a.py", "import os\nos.environ['A'] = '1'", None),
    ("ray_cluster/observability/a.py", "x = 1\n" * 601, "sizes"),
    ("tests/test_a.py", "x = 1\n" * 601, "sizes"),
    ("ray_cluster/observability/a.py", "x = 1\n" * 600, None),
    ("ray_cluster/observability/a.py", "def f():\n" + "    x = 1\n" * 60, "sizes"),
    ("ray_cluster/observability/a.py", "async def f():\n" + "    x = 1\n" * 59, None),
    ("ray_cluster/observability/a.py", "try:\n    f()\nexcept Exception:\n    pass", "swallowing"),
    (
        "ray_cluster/observability/a.py",
        "try:\n    f()\nexcept (OSError, Exception): ...",
        "swallowing",
    ),
    ("tests/test_a.py", "try:\n    f()\nexcept:\n    pass", "swallowing"),
    ("ray_cluster/observability/a.py", "try:\n    f()\nexcept OSError:\n    pass", None),
    (
        "ray_cluster/observability/a.py",
        "try:\n    f()\nexcept Exception:\n    log()\n    raise",
        None,
    ),
    ("ray_cluster/observability/a.py", "cache = {}", "state"),
    ("ray_cluster/observability/a.py", "cache: dict[str, int] = dict()", "state"),
    ("ray_cluster/observability/a.py", "def f():\n    global x\n    x = 1", "state"),
    ("ray_cluster/observability/a.py", "NAMES = {'a': 1}\nORDER = ['a']", None),
]


def test_rules_fire_on_planted_breaches(tmp_path: Path) -> None:
    wrong = []
    for number, (path, code, rule) in enumerate(PLANTED):
        root = tmp_path / str(number)
        plant(root, path, code)
        (found,) = files(root)
        breaches = check(load(root, found))
        if {breach.rule for breach in breaches} != ({rule} if rule else set()):
            wrong.append((path, code, rule, breaches))
    assert not wrong


def test_indirect_imports_are_followed(tmp_path: Path) -> None:
    plant(tmp_path, "ray_cluster/simulator/run.py", "from ray_cluster.models import rows")
    plant(tmp_path, "ray_cluster/models/__init__.py", "from ray_cluster.models import rows")
    plant(tmp_path, "ray_cluster/models/rows.py", "import ray_cluster.engine.step as step")
    plant(tmp_path, "ray_cluster/engine/step.py", "import torch")
    sources = [load(tmp_path, path) for path in files(tmp_path)]
    assert route(sources, "simulator", "engine") == [
        "ray_cluster.simulator.run",
        "ray_cluster.models.rows",
        "ray_cluster.engine.step",
    ]
    assert route(sources, "simulator", "torch")[-1] == "torch"
    assert route(sources, "engine", "simulator") == []


def plant(root: Path, path: str, code: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(code)
