"""Benchmarks of the engine: small models, a model of real size, windows of some KV heads."""
