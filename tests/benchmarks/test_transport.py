"""The benchmark of links measures every kind."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.transport.__main__ import main
from tests.transport.harness import KINDS


def test_a_quick_run_has_a_row_for_every_size_and_link(tmp_path: Path) -> None:
    assert main(["--quick", "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rows = found["sections"]["trips"]["tables"]["round trips"]
    assert {(row["link"], row["KiB"]) for row in rows} == {
        (kind, size) for kind in KINDS for size in (108, 4096)
    }
    assert all(row["ms"]["median"] > 0 for row in rows)
