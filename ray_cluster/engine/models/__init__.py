"""Loads the models of a folder, with their weights as the device is fastest with."""
