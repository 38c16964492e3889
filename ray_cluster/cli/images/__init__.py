"""``generate``: images from a service or from this process."""
