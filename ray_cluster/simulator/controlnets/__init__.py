"""ControlNets and LoRAs in simulations."""
