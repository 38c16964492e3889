"""The HTTP API: OpenAI Images with extensions, on a dispatcher behind a small interface."""
