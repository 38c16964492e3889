"""``models`` and ``profile``: list, train, calibrate and measure models."""
