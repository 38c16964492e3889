"""The command line: ``ray-cluster serve | generate | models | doctor | version``.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    from ray_cluster.cli.app import app

    app(prog_name="ray-cluster")
