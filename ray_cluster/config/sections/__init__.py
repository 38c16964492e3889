"""The sections of a configuration."""
