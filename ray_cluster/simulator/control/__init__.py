"""Experiments with a control loop on a simulated cluster."""
