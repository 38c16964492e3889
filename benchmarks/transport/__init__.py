"""How long tensors take between processes."""
