"""The worker of an upscaler."""
