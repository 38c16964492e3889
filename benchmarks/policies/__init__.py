"""Figures of policies: simulated attainment, and what decisions cost."""
