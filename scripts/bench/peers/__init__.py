"""Other projects' kernels as contenders: each takes the same cases and the same memory."""
