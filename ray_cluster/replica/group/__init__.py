"""The worker whose model runs on several ranks: its head, and its ranks."""
