"""The plan loop."""
