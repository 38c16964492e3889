"""Experiments on cascades over a day."""
