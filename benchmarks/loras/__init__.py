"""LoRAs in the engine: what they cost a step, and over diffusers with one LoRA at a time."""
