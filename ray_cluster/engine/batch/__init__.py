"""How large a batch may be, how its rows lie in memory, and what its steps cost."""
