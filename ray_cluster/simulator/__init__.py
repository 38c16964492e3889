"""Asks on a virtual clock what a service would do: the production decisions, simulated machines."""
