"""Measures of image quality, among them our own attribute classifier."""
