"""Harness of the benchmarks of operations (`scripts/bench_ops.py`).

In reading order: `case` (cases, baselines, benchmarks), `session` (one run and its report), `timing` (chains of calls
and their time), `pools` (random page pools), `device` (rates, versions, commit), `report` and `plot` (results as table
and picture).
"""
