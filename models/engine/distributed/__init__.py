"""Data-parallel ranks and engines of several processes."""
