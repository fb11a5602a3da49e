"""Data-parallel ranks, and engines that run in several processes."""
