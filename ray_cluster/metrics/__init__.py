"""Metrics: one registry per process, merged where anybody asks."""
