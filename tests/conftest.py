"""What holds for every test: no downloads, one compute thread per process, Ray without extras."""

import gc
import os
import socket

# before anything imports torch, ray or huggingface_hub: they read these once. Ray's workers and
# every subprocess inherit them
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    MPLBACKEND="Agg",
)
os.environ.pop("RAY_ADDRESS", None)
# Triton reads it when it is imported: without a GPU its kernels run in its interpreter
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.slices import End, Slice

# until all tests are collected: a quarter of that time went into looking for garbage
gc.disable()

# how many examples a property is tried with: `--hypothesis-profile thorough` is for the slices of
# slow tests. The clock of a shared machine proves nothing
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _TIMELESS, max_examples=40)
settings.register_profile("thorough", _TIMELESS, max_examples=400)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption(
        "--slow-slice",
        metavar="NUMBER/COUNT",
        help="run only a part of the slow and property tests: NUMBER modulo COUNT",
    )
    group.addoption(
        "--end-after", metavar="MINUTES", type=float, help="skip what has not run by then"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep Ray tests in one xdist worker, before the others, and skip GPU tests without a GPU.

    Other tests go to workers a module at a time: what its tests share is made once. A Ray test must
    not have an `xdist_group` of its own: xdist joins the names to a new group.
    """
    # theirs is the longest chain, and mostly waits
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.collect()
    # a million objects that stay until the end
    gc.freeze()
    gc.enable()


class _Failures:
    """Says at once which test failed: a run that is stopped never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else ""
            reporter.write_line("")
            reporter.write_line(f"{report.when} of {report.nodeid} failed: {why:.500}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow_slice:
        config.pluginmanager.register(Slice(config.option.slow_slice))
    # workers of xdist report to the process that writes
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))
    if config.option.end_after is not None:
        config.pluginmanager.register(End(config.option.end_after))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
