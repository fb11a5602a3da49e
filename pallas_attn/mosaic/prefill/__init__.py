"""Prefill kernels: configuration, block schedule, KV splits and the warpgroup pipeline."""
