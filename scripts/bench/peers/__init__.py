"""Kernels of other projects as baselines. Each baseline runs the same cases on the same memory."""
