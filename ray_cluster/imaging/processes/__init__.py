"""Child processes that code images, and the queue before them."""
