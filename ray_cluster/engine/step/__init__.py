"""One denoising step of a batch of requests: their states, the model call, the samplers' update."""
