"""``generate --url`` with fewer steps: what is asked for arrives, and what came of it is told."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.cli.served import Served


def test_fewer_steps_are_asked_for_and_told(cli: Cli, served: Served, tmp_path: Path) -> None:
    here = ("--url", served.url, "--api-key", "secret")
    result = cli(
        *("generate", "a red circle", *here, "--fidelity", "balanced"),
        *("--allow", "steps", "--allow", "fidelity", "--min-steps", 5, "-o", tmp_path / "a.png"),
    )
    assert result.exit_code == 0, result.output
    (made,) = served.made
    assert (made.num_steps, made.fewest_steps) == (6, 3)
    assert "  balanced: 6 of 10 steps  " in result.stdout
    jobs = cli("jobs", "list", *here, "--json").stdout
    shown = cli("jobs", "show", json.loads(jobs)[0]["id"], *here).stdout
    assert "balanced: 6 of 10 steps" in shown
    refused = cli("generate", "x", *here, "--min-steps", 11, "-o", tmp_path / "b.png")
    assert "(option --min-steps)" in refused.stderr
