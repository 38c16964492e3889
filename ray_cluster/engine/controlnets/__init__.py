"""ControlNets: residuals of a map that images follow, computed here or by others."""
