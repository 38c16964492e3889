"""The step engine against the diffusers pipeline and against the bare model."""
