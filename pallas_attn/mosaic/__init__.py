"""Mosaic GPU kernels, and code that they share. `hopper` and `blackwell` have the code of one architecture."""
