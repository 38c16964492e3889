"""How many examples a property is tried with, where each of them takes long."""

from hypothesis import settings

# a quarter of what the profile has that runs: `tests/conftest.py`
a_few = settings(max_examples=settings().max_examples // 4)
