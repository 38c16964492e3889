"""Measurements of the engine and the service; ``python -m benchmarks.run`` runs them all."""
