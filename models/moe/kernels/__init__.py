"""Expert GEMM kernels for Hopper. `pipeline` has the structure that all four kernels share."""
