"""Tensors between processes, several back ends behind one interface."""
