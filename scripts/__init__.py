"""Scripts for users: `run_decode.py`, `calibrate.py`, `bench_ops.py`, `bench_engine.py` and other benchmarks.

The code of `run_decode.py` and `calibrate.py` is in `models/cli`. The packages are `bench` (benchmarks) and `tools`
(tools for contributors).
"""
