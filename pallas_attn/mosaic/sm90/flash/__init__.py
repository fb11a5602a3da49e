"""The prefill kernel for Hopper: schedule, kernel, split keys."""
