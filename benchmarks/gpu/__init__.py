"""One command for a machine with a GPU: kernels, exactness, denoising steps, mixed sizes."""
