"""Discriminators: how sure one can be that an image is right for its prompt."""
