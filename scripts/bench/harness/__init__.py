"""Harness of the benchmarks of operations.

In reading order: `case` (cases, baselines, benchmarks), `session` (one run and its report), `timing` (chains of calls
and their time), `pools` (random page pools), `device` (rates, versions, commit), `report` and `plot` (results as table
and picture).
"""
