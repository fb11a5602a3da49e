"""Experimental: has never run on a card. Mosaic GPU kernels for data-center Blackwell (compute capability 10.0)."""
