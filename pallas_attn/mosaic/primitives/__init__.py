"""Building blocks that Mosaic GPU kernels of every architecture share."""
