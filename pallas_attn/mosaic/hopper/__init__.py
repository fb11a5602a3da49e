"""Mosaic GPU kernels and primitives for Hopper (compute capability 9.0)."""
