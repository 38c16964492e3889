"""The command line: ``ray-cluster serve | generate | jobs | models | doctor | version``.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line and exit with its code."""
    from ray_cluster.cli.app import app

    try:
        app(prog_name="ray-cluster")
    finally:
        # the interpreter's last collection would take seconds for what torch and Ray leave behind
        gc.freeze()
