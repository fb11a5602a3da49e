"""Cases of benchmarks that several modules share: what a call costs at least, and its arguments on the device."""
