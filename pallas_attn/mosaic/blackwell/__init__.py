"""Experimental: has never run on a card. Mosaic GPU kernels for Blackwell (compute capability 10.0)."""
