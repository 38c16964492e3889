"""Where files of LoRAs come from, and what may be fetched."""
