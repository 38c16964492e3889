"""The worker that makes images: leases in, images out."""
