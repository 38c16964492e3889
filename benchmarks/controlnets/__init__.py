"""ControlNets: images and steps with them, in one process and with services of their own."""
