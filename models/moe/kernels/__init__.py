"""Grouped GEMM kernels of the routed experts, for Hopper."""
