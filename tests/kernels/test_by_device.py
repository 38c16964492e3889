"""Which implementation is called, and that nobody needs Triton who does not use it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.kernels.by_device import triton_twin
from tests.kernels.ops import Ops

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = [
    ("geglu", "geglu"),
    ("group_norm_silu", "group_norm_silu"),
    ("grouped_low_rank", "grouped_low_rank"),
    ("row_gather", "row_gather"),
    ("row_scatter", "row_scatter"),
    ("sampler_update", "sampler_update"),
    ("segment_stats", "segment_stats"),
]


class OnCuda(Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda = True


def test_every_op_is_listed_here() -> None:
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/op.py")}
    assert folders == {op for op, _ in FUNCTIONS}
    assert {path.parent.name for path in (ROOT / "kernels").glob("*/triton.py")} == folders


@pytest.mark.parametrize(("op", "name"), FUNCTIONS)
def test_both_implementations_have_one_signature(op: str, name: str, triton_ops: Ops) -> None:
    functions = [
        getattr(import_module(f"ray_cluster.kernels.{op}.{kind}"), name)
        for kind in ("op", "reference", "triton")
    ]
    signatures = [inspect.signature(function) for function in functions]
    assert signatures[0] == signatures[1] == signatures[2]


def test_tensors_on_cuda_go_to_triton_and_others_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, triton_ops: Ops
) -> None:
    from ray_cluster.kernels.geglu import op, reference

    def by_triton(x: Tensor) -> str:
        return "triton"

    monkeypatch.setattr("ray_cluster.kernels.geglu.triton.geglu", by_triton)
    assert triton_twin(reference.geglu) is by_triton
    host = torch.ones(2, 4)
    answer: Any = op.geglu(host.as_subclass(OnCuda))
    assert answer == "triton"
    assert torch.equal(op.geglu(host), reference.geglu(host))
    assert torch.equal(op.geglu(x=host), reference.geglu(host))


def test_without_triton_the_reference_runs_on_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_cluster.kernels import by_device
    from ray_cluster.kernels.geglu import op, reference

    monkeypatch.setattr(by_device, "has_triton", lambda: False)
    host = torch.ones(2, 4)
    assert torch.equal(op.geglu(host.as_subclass(OnCuda)), reference.geglu(host))


def test_an_error_of_tritons_is_one_of_the_call(
    monkeypatch: pytest.MonkeyPatch, triton_ops: Ops
) -> None:
    """It ends no thread: its classes are no RuntimeErrors, and nobody imports them elsewhere."""
    from triton.runtime.errors import OutOfResources

    from ray_cluster.kernels.geglu import op

    def fails(x: Tensor) -> Tensor:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr("ray_cluster.kernels.geglu.triton.geglu", fails)
    with pytest.raises(RuntimeError, match="Triton cannot run geglu: OutOfResources"):
        op.geglu(torch.ones(2, 4).as_subclass(OnCuda))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from importlib import import_module
for op in sys.argv[1:]:
    import_module(f"ray_cluster.kernels.{op}.op")
from ray_cluster.kernels.geglu.op import geglu
print(geglu(torch.ones(1, 2)).shape)
"""


def test_ops_are_imported_and_run_where_triton_cannot_be() -> None:
    names = sorted({op for op, _ in FUNCTIONS})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "torch.Size([1, 1])", done.stderr
