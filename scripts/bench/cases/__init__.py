"""Cases that several benchmarks share: minimum bytes and operations of a call, and its arguments on the device."""
