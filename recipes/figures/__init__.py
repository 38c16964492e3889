"""Measures the built-in models."""
