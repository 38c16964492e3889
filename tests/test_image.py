"""The Dockerfile installs what the project pins, and sets what Ray's processes read."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml

from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.deployments.serve import ray_environment
from tests.test_packaging import expected_members, project_files

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"cpu": {"postgresql", "cloud"}, "gpu": {"postgresql", "cloud", "gpu"}}
# a service's configuration says it, or whoever starts the nodes of a cluster
CONFIGURED = {"RAY_AUTH_MODE"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


@cache
def stages() -> Mapping[str, list[tuple[str, str]]]:
    """Instructions of each stage of the Dockerfile, in order; what precedes all is in stage ""."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.split(" AS ")[1]
            found[stage] = []
        if word:
            found[stage].append((word, re.sub(r" +", " ", rest).strip()))
    return found


def said(stage: str, word: str) -> list[str]:
    """The arguments of all instructions of one kind."""
    return [rest for name, rest in stages()[stage] if name == word]


def environment(stage: str) -> dict[str, str]:
    pairs = (pair.partition("=") for line in said(stage, "ENV") for pair in line.split())
    return {name: value.strip('"') for name, _, value in pairs}


def test_the_base_has_the_ray_that_is_pinned_and_the_oldest_python() -> None:
    (image,) = said("", "ARG")
    python = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
    assert image == f"RAY_IMAGE=rayproject/ray:{PINS['ray']}-py{python}"
    for target in TARGETS:
        assert said(target, "FROM") == [f"${{RAY_IMAGE}}-{target} AS {target}"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_installed_is_pinned_and_has_the_extras_of_the_project(target: str) -> None:
    assert TARGETS[target] <= PROJECT["optional-dependencies"].keys()
    installs = re.findall(r"pip install (.+?) (?=&&)", " ".join(said(target, "RUN")))
    torch, requirements, wheel = installs
    constrained = " -c /requirements/constraints.txt "
    assert torch.startswith("--no-cache-dir --no-deps ${TORCH_INDEX:+")
    assert torch.endswith(f"{constrained}torch")
    (extras,) = re.findall(r"\[([\w,]+)\]", requirements)
    assert set(extras.split(",")) == TARGETS[target]
    assert constrained in requirements
    # the requirements are there by then: nothing that is not pinned may come with the code
    assert wheel == "--no-cache-dir --no-deps --force-reinstall /wheel/ray_cluster-*.whl"
    assert {"torch", "setuptools", "gcsfs", "s3fs", "psycopg", "triton"} <= PINS.keys()


def test_torch_of_the_cpu_image_comes_without_cuda() -> None:
    assert said("cpu", "ARG") == ["TORCH_INDEX=https://download.pytorch.org/whl/cpu"]
    assert said("gpu", "ARG") == ["TORCH_INDEX="]


@pytest.mark.parametrize("target", TARGETS)
def test_ray_s_processes_find_the_variables_that_serve_would_set(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, str] = {}
    monkeypatch.setattr(ray_environment, "set_environment", wanted.update)
    ray_environment.apply_ray_environment(RayConfig())
    given = environment(target)
    read = {name for name in given if name.startswith("RAY_") or name in wanted}
    assert {name: given[name] for name in read} == {
        name: value for name, value in wanted.items() if name not in CONFIGURED
    }


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_no_root_and_writes_on_volumes_alone(target: str) -> None:
    assert said(target, "USER")[-1] == "1000:100"
    given, (volumes,) = environment(target), said(target, "VOLUME")
    written = {given["HOME"], given["HF_HOME"], *said(target, "WORKDIR")}
    assert written == set(yaml.safe_load(volumes))
    assert given["PYTHONDONTWRITEBYTECODE"] == "1"
    made = next(run for run in said(target, "RUN") if "install -d" in run)
    assert made.split("install -d ")[1].startswith("-o 1000 -g 100 ")
    assert written <= set(made.split())


def test_both_images_differ_in_base_torch_extra_and_libraries_alone() -> None:
    cpu, gpu = (
        [" ".join(one).replace(",gpu]", "]") for one in stages()[target] if one[0] != "FROM"]
        for target in TARGETS
    )
    assert {one.partition("=")[0] for one in set(cpu) ^ set(gpu)} == {
        "ARG TORCH_INDEX",
        "ENV LD_LIBRARY_PATH",
    }


def reaches_the_build(path: Path) -> bool:
    """Whether Docker sends a file, by .dockerignore: the last pattern that matches counts."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = True
    for pattern in (line for line in lines if line and not line.startswith("#")):
        name = pattern.removeprefix("!").removeprefix("**/")
        parts = path.parts if "**/" in pattern else path.parts[:1]
        if any(fnmatch.fnmatchcase(part, name) for part in parts):
            sent = pattern.startswith("!")
    return sent


def test_the_build_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    sent = {path for path in project_files() if reaches_the_build(path)}
    links = {Path("ray_cluster") / name for name in ("policies", "kernels", "deployments")}
    assert links <= sent
    for member in map(Path, expected_members()):
        is_linked = Path(*member.parts[:2]) in links
        assert (Path(*member.parts[1:]) if is_linked else member) in sent
    others = {path.parts[0] for path in sent} - {"ray_cluster", "policies", "kernels"}
    assert others == {"deployments", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    for name in (".env", ".git/config", ".venv/bin/python", "ray_cluster/__pycache__/a.pyc"):
        assert not reaches_the_build(Path(name))


def tool(name: str) -> str:
    """The path of a program that PyPI's packages bring; the test is skipped without it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"{name} is missing: install the extra `dev`")
    return found


def run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = run(tool("hadolint"), "Dockerfile")
    assert done.returncode == 0, done.stdout
