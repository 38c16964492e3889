"""The worker that makes images by calls of diffusers' own pipelines."""
