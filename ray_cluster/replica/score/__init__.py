"""The worker of a discriminator."""
