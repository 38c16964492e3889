"""Edits in the step engine: what a template is, and how each step keeps what a mask spares."""
