"""The harness of the benchmarks of operations.

In reading order: `case` (cases, contenders, benchmarks), `session` (one run and its report), `timing` (chains of calls
and their time), `pools` (random page pools), `device` (rates, versions, commit), `report` and `plot` (results for
people), `compiler` (registers and shared memory of compiled kernels, for tuning).
"""
