"""How operations and the engine are measured; `bench_ops.py` and `bench_engine.py` run it."""
