"""Which implementation of an operation would run a call, and why the others would not."""

from __future__ import annotations

from typing import Any

from pallas_attn import dispatch
from pallas_attn.dispatch import Explanation
from pallas_attn.ops import (
    gather_latent,
    mla_decode,
    mla_prefill,
    paged_decode,
    paged_prefill,
    plan_decode,
    ragged_attention,
    write_kv,
    write_latent,
)
from pallas_attn.types import Implementation

_OPS = {
    "paged_decode": (paged_decode.paged_decode, paged_decode.IMPLEMENTATIONS),
    "paged_prefill": (paged_prefill.paged_prefill, paged_prefill.IMPLEMENTATIONS),
    "mla_decode": (mla_decode.mla_decode, mla_decode.IMPLEMENTATIONS),
    "ragged_attention": (ragged_attention.ragged_attention, ragged_attention.IMPLEMENTATIONS),
    "mla_prefill": (mla_prefill.mla_prefill, ragged_attention.IMPLEMENTATIONS),
    "plan_decode": (plan_decode.plan_decode, plan_decode.IMPLEMENTATIONS),
    "write_kv": (write_kv.write_kv, write_kv.IMPLEMENTATIONS),
    "write_latent": (write_latent.write_latent, write_latent.IMPLEMENTATIONS),
    "gather_latent": (gather_latent.gather_latent, gather_latent.IMPLEMENTATIONS),
}


def explain(op: str, *args: Any, implementation: Implementation = None, **kwargs: Any) -> Explanation:
    """Which implementation would run `op` with these arguments here, and why those tried before it would not.

    >>> print(pallas_attn.explain("paged_decode", q, kv, block_tables, kv_lens))

    Args:
      op: name of an operation, such as "paged_decode".
      *args, **kwargs: as the operation takes them; `jax.ShapeDtypeStruct`s will do in place of arrays.
      implementation: as the operation takes it.

    Raises:
      ValueError: no such operation, or arguments the operation itself would refuse.
    """
    if op not in _OPS:
        raise ValueError(f"op: expected one of {', '.join(_OPS)}, got {op!r}")
    function, loaders = _OPS[op]
    return dispatch.explain(op, function, loaders, implementation, *args, **kwargs)
