"""Quality against time: reuse across steps, beside fewer steps."""
