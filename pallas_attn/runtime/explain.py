"""Report which implementation of an operation would run a call, and why other implementations would not."""

from __future__ import annotations

import importlib
from typing import Any

from pallas_attn.runtime import dispatch
from pallas_attn.runtime.dispatch import Explanation
from pallas_attn.types import Implementation

CANDIDATES_OF = {op: op for op in dispatch.MODULES} | {
    "mla_prefill": "ragged_attention",
    "cascade_decode": "paged_decode",
    "ragged_paged_attention": "paged_prefill",
    "mla_ragged_paged_attention": "mla_decode",
}
"""For each operation, the operation whose implementations `explain` compares.

It is the operation itself. For an operation that only calls other operations, it is an attention operation among them.
"""


def explain(op: str, *args: Any, implementation: Implementation = None, **kwargs: Any) -> Explanation:
    """Return which implementation would run a call on this device, and why implementations with a higher preference
    would not. Nothing runs.

    Args:
      op: name of an operation, for example "paged_decode".
      *args, **kwargs: arguments of the operation. Arrays may be `jax.ShapeDtypeStruct`s.
      implementation: the argument `implementation` of the call: None, a name, or names to try in order.

    Raises:
      ValueError: no operation has this name, or the operation raises ValueError for these arguments.

    Example:
      >>> q = k = v = jax.ShapeDtypeStruct((5, 2, 8), jnp.float32)
      >>> offsets = jax.ShapeDtypeStruct((2,), jnp.int32)
      >>> print(pallas_attn.explain("ragged_attention", q, k, v, offsets, offsets))
      ragged_attention: xla
        not mosaic: needs a GPU of compute capability 9.0 (H100, H200) or 10.0 (B200, GB200), this is cpu
        not triton: needs a GPU of compute capability 8.0 or later, this is cpu
    """
    if op not in CANDIDATES_OF:
        raise ValueError(f"op: expected one of {', '.join(CANDIDATES_OF)}, got {op!r}")
    function = getattr(importlib.import_module(f"pallas_attn.ops.{op}"), op)
    return dispatch.explain(op, function, CANDIDATES_OF[op], implementation, *args, **kwargs)
