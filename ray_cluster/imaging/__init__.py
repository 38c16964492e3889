"""Encoding, decoding and resizing of images, in processes of their own."""
