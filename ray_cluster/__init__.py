"""Deadline-keeping diffusion image generation on Ray Serve."""

__version__ = "0.1.0"
