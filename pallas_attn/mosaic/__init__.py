"""Mosaic GPU kernels and shared code. Code for one GPU architecture is in `hopper` and in `blackwell`."""
