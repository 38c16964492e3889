"""The stages of a request, and what follows on each."""
