"""What kernels for Hopper share: wgmma, tiles, the decode kernel, and in `flash` the prefill kernel."""
