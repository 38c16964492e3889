"""The tensor ops against their naive composition in torch, and against a copy of their bytes."""
