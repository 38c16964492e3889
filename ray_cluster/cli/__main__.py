"""``python -m ray_cluster.cli``: the command line without its entry script."""

from ray_cluster.cli import main

main()
