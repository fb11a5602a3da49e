"""Code shared by kernels for Hopper: wgmma, tiles, the decode kernel, and the prefill kernel in `flash`."""
