"""Prefill on any architecture: settings, scheduling, KV splits, and the producer with its rings of keys and values."""
