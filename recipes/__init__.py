"""Recipes of the built-in model family."""
