"""Scripts for users: `run_decode.py`, `calibrate.py`, `tune.py`, `bench_ops.py` and `bench_engine.py`.

Beside them the packages that these are made of: `cli` (command lines, models and prompts as options), `decode` (parts
of `run_decode.py`), `bench` (measuring), and `tools` for those who change the code.
"""
