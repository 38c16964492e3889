"""The live workers of a cell, the ControlNets and LoRAs that they have."""
