"""The lean executor of the DiT family."""
