"""Benchmarks of operations (`bench_ops.py`) and of the engine (`bench_engine.py` and others).

- `ops`: one module per operation with a `BENCH`: grids of cases, baselines, and the call of our implementations.
- `cases`: cases that several benchmarks share: bytes, operations and arguments.
- `peers`: kernels of other projects, run with the same cases.
- `harness`: shared by all benchmarks: timing, page pools, device and rates, sessions, reports and plots.
- `engine`: measurements of whole engines with random models: throughput, latency, speculation, several devices.
- `shapes`: argument shapes of real models, which tests/ops/test_real_sizes.py also uses.
"""
