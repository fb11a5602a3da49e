"""Code that Triton kernels share: launching them on jax arrays, the interpreter, and device functions."""
