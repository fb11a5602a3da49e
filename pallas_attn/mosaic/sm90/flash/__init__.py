"""The prefill kernel on Hopper."""
