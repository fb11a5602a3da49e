"""Scripts for users: `run_decode.py`, `calibrate.py`, `bench_ops.py`, `bench_engine.py` and other benchmarks.

The packages have the parts of these scripts: `cli` (command lines, model and prompt options), `decode` (parts of
`run_decode.py`), `bench` (benchmarks) and `tools` (tools for contributors).
"""
