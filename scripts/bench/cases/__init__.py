"""Cases that several benchmarks share: the least work of a call, and its arguments on the device."""
