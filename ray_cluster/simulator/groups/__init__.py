"""Experiments on sequence-parallel groups."""
