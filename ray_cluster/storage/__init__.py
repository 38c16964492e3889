"""Blobs (results, states, inputs) and their formats."""
