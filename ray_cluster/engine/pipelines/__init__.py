"""Pipelines of diffusers as they are: an image is a call, and nothing is known of its inside."""
