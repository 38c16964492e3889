"""A group of ranks in a running service, whose steps last as long as published ones."""
