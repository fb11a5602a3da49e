"""Shared code of Triton kernels: launches on jax arrays, the interpreter, tile sizes, and device functions."""
