"""Every kernel compiles for a GPU, here where there is none."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.ops import Ops

ROOT = Path(__file__).resolve().parents[2]


def kernels() -> set[str]:
    """The functions that are launched, by the names that kernels have in this project."""
    names = set()
    for path in (ROOT / "kernels").glob("*/triton.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                names.add(node.name)
    return names


# a real model's sizes, and those of which arguments are constants too
@pytest.mark.parametrize("num_cases", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu(triton_ops: Ops, tmp_path: Path, num_cases: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", str(num_cases)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # image_of is called by kernels and compiled with them
    assert set(done.stdout.split()) == kernels() - {"image_of"}
