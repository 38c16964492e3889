"""Diffusion transformers on groups of ranks: each request's step has a set of its own."""
