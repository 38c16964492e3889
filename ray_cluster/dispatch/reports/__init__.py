"""What the dispatcher counts, logs and shows."""
