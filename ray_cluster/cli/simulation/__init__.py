"""``simulate`` and ``plan``: workers, tables and plots of simulated runs."""
