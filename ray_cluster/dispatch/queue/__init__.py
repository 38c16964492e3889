"""The waiting queue: who is admitted, who waits, and how each request ends."""
