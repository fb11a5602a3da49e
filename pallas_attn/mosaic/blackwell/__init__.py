"""Experimental: Mosaic GPU kernels for Blackwell (compute capability 10.0). They have never run on a card."""
