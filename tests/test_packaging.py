"""A wheel, an sdist and a Ray upload all carry the linked folders as real files that import."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("policies", "kernels", "deployments")
DATA_SUFFIXES = {".yaml", ".safetensors", ".json", ".txt", ".md", ".png", ".jpg"}
PAGE_SUFFIXES = {".html", ".css", ".js", ".svg"}

# these share the archives, which only one xdist worker should make
in_one_worker = pytest.mark.xdist_group("packaging")


def project_files() -> list[Path]:
    """Tracked files and those git would track, relative to the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = [Path(name) for name in listed.stdout.split("\0") if name]
    return [name for name in names if os.path.lexists(ROOT / name)]


def expected_members() -> set[str]:
    """What every archive must hold, under the names users import."""
    members = set()
    for path in project_files():
        top = path.parts[0]
        if top not in ("ray_cluster", *LINKED) or (ROOT / path).is_symlink():
            continue
        data = path.parts[1] == "configs" or "weights" in path.parts
        page = path.parts[1] == "page" and path.suffix in PAGE_SUFFIXES
        code = path.suffix == ".py" or path.name == "py.typed"
        if code or page or (data and path.suffix in DATA_SUFFIXES):
            members.add((Path("ray_cluster") / path if top in LINKED else path).as_posix())
    return members


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, each built straight from a clean copy of the tree."""
    copy = tmp_path_factory.mktemp("copy")
    for path in project_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    built = tmp_path_factory.mktemp("built")
    run("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(built), str(copy))
    return built


@in_one_worker
def test_wheel_holds_code_weights_and_configs(archives: Path) -> None:
    with zipfile.ZipFile(only(archives, "*.whl")) as wheel:
        members = set(wheel.namelist())
    assert expected_members() <= members
    assert "ray_cluster/policies/types.py" in members
    strays = {name for name in members if not name.startswith(("ray_cluster/", "ray_cluster-"))}
    assert not strays, "the wheel must not install top-level names beside ray_cluster"


@in_one_worker
def test_sdist_holds_code_weights_and_configs(archives: Path) -> None:
    with tarfile.open(only(archives, "*.tar.gz")) as sdist:
        members = {m.name.partition("/")[2]: m for m in sdist.getmembers()}
    assert expected_members() <= members.keys()
    assert not [m.name for m in members.values() if m.issym()], "links do not survive everywhere"
    assert members["ray_cluster/policies/types.py"].size > 0


@in_one_worker
@pytest.mark.parametrize("pattern", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.slow)])
def test_installed_archive_imports(archives: Path, tmp_path: Path, pattern: str) -> None:
    target = tmp_path / "site"
    run(
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--no-index", "--no-build-isolation", "--target", str(target)),
        str(only(archives, pattern)),
    )
    found = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import ray_cluster, ray_cluster.policies.types as types\n"
        "print(ray_cluster.__version__, types.__file__)",
        cwd=tmp_path,
    )
    assert found.split() == ["0.1.0", str(target / "ray_cluster/policies/types.py")]
    assert (target / "bin/ray-cluster").exists()


def test_project_root_on_the_path_does_not_hide_hugging_face_kernels(tmp_path: Path) -> None:
    package = tmp_path / "kernels/__init__.py"
    package.parent.mkdir()
    package.touch()
    found = run(
        "-c",
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "import kernels, ray_cluster.kernels\n"
        "print(kernels.__file__)",
        cwd=tmp_path,
    )
    assert found.strip() == str(package)


UPLOAD = """
import os, sys, ray
ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
    object_store_memory=80 * 2**20, _temp_dir=sys.argv[2], _node_ip_address="127.0.0.1",
    runtime_env={"working_dir": sys.argv[1], "excludes": [".venv", ".git", ".runs"]},
)

@ray.remote
def probe():
    import ray_cluster.policies.types as types
    names = [name for name in (".venv", ".git", ".runs") if os.path.exists(name)]
    return os.path.realpath(types.__file__), os.path.realpath("."), names

file, folder, unwanted = ray.get(probe.remote(), timeout=90)
ray.shutdown()
assert not unwanted, unwanted
assert file == folder + "/ray_cluster/policies/types.py", (file, folder)
assert file.startswith(os.path.realpath(sys.argv[2])), file
print("uploaded")
"""


@pytest.fixture
def ray_temp_dir() -> Iterator[str]:
    """A folder whose name is short enough for Ray's unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield name


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ray_worker_imports_policies_from_an_upload(ray_temp_dir: str, tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", UPLOAD, str(ROOT), ray_temp_dir],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = driver.communicate(timeout=200)
    finally:
        # ray's daemons live in the driver's process group; after ray.shutdown() it is empty
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, output
    assert output.strip().endswith("uploaded")


def only(folder: Path, pattern: str) -> Path:
    """The one file that matches."""
    (found,) = folder.glob(pattern)
    return found


def run(*args: str, cwd: Path = ROOT) -> str:
    """Standard output of this Python with some arguments; fails with all that it said."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout
