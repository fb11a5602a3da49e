"""Benchmarks of operations (`bench_ops.py`, `tune.py`) and of the engine (`bench_engine.py`).

- `ops`: one module for each operation, with a `BENCH`: grids of cases, contenders, and how ours are called.
- `cases`: cases that an operation shares with its peers or with others: bytes, operations and arguments.
- `peers`: other projects' kernels under the same cases.
- `harness`: what every benchmark needs: timing, page pools, the device and its rates, sessions, reports and pictures.
- `engine`: the engine on small models, on one of real size, and with windows of some KV heads.
- `shapes`: named argument shapes of real models, which tests on real sizes use too.
"""
