"""LoRAs in the step engine: from files to factors, and from factors to what a request adds."""
