"""The device: its errors, streams and graphs, and how long its operations take."""
