"""Checkpoints in one file: what they are, and the folder that stands for each."""
