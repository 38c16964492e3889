"""Durable jobs: what they are, and the store that outlives every process."""
