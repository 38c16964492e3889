"""The LoRAs of a cell: their registry, the stores that have them, and who waits for them."""
