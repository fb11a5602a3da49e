"""What Mosaic GPU kernels share: here on any architecture, in `sm90` on Hopper."""
