"""The lean executor of the UNet family."""
