"""Trains and measures the built-in discriminators."""
