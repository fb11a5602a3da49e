"""Replacements of JAX functions that are in effect while our own kernels are lowered."""
