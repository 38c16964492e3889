"""The schedules of samplers as coefficients, from diffusers' own tables."""
