"""The store of LoRAs of a node: fetched, verified, converted, kept."""
