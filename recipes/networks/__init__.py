"""The networks of the built-in models, and how each is trained."""
