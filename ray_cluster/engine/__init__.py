"""The step engine: one denoising step at a time for a batch of requests. No Ray, no HTTP."""
