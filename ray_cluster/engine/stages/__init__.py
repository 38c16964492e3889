"""The stages around the step: prompts encoded, latents decoded, each in its own thread."""
