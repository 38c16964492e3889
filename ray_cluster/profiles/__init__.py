"""Latency profiles: tables in files, with where each figure comes from."""
