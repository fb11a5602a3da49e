"""Which implementation of an operation would run a call, and why the others would not."""

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
"""By operation, the one whose implementations are its candidates: itself or, for a composition, its main part."""


def explain(op: str, *args: Any, implementation: Implementation = None, **kwargs: Any) -> Explanation:
    """Which implementation would run `op` with these arguments here, and why those tried before it would not.

    Args:
      op: name of an operation, such as "paged_decode".
      *args, **kwargs: as the operation takes them; `jax.ShapeDtypeStruct`s will do in place of arrays.
      implementation: as the operation takes it.

    Raises:
      ValueError: no such operation, or arguments the operation itself would refuse.

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
