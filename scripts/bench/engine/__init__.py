"""Benchmarks of the engine. Each module describes its measurement and is run by a script `scripts/bench_*.py`."""
