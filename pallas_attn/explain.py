"""Which implementation of an operation would run a call, and why the others would not."""

from __future__ import annotations

import importlib
from typing import Any

from pallas_attn import dispatch
from pallas_attn.dispatch import Explanation
from pallas_attn.types import Implementation

_CHOOSER = {op: op for op in dispatch.MODULES} | {"mla_prefill": "ragged_attention"}
"""By operation, whose implementations are its candidates: its own or, for a composition, those of its main part."""


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
        not mosaic: needs a GPU of compute capability 9.0 (H100, H200), this is cpu
    """
    if op not in _CHOOSER:
        raise ValueError(f"op: expected one of {', '.join(_CHOOSER)}, got {op!r}")
    function = getattr(importlib.import_module(f"pallas_attn.ops.{op}"), op)
    return dispatch.explain(op, function, _CHOOSER[op], implementation, *args, **kwargs)
