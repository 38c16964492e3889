"""How processes call each other, and what bounds a call."""
