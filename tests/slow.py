"""The cases that the ordinary run leaves to `make test-slow`, beside those marked where they are written.

Each is here because other cases run all of its parts in every run: the reason above a group or beside a pattern says
which. Cases of backends in the contract suites are in `tests/contract/backends.py`, those of the compile gate in
`tests/aot/cases.py`.
"""

SLOW = (
    r"contract/test_ragged_paged_attention.py::test_quantised_tokens\[xla-(int8-an array|float8_e4m3fn-(heads|a n))",
)
