"""Edits over diffusers' inpainting pipeline, and what images cost beside the model's work."""
