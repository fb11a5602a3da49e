"""Merge attention over disjoint sets of keys into attention over all keys."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn import checks
from pallas_attn.portable.arguments import refuse_gradients


def merge_states(
    outs: Float[Array, "n *rows D"], lses: Float[Array, "n *rows"], sinks: Float[Array, "Hq"] | None = None
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Merge attention over n disjoint sets of keys (FlashAttention, arXiv:2205.14135, section 3.1).

    Args:
      outs: n partial outputs, each normalized over its own keys and computed without sinks.
      lses: float32 natural log-sum-exps of the scores (`lse_from_base2` converts base-2 values). Parts without a
        visible key have -inf or, as in some other libraries, +inf.
      sinks: learned sink logits of the query heads, the last axis of a row. They are applied here, once.

    Returns:
      The output over all keys in the dtype of `outs`, 0 if no key is visible, and its LSE without the sinks.

    Raises:
      ValueError: shapes or dtypes do not fit each other.

    Example:
      >>> outs, lses = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]]), jnp.zeros((2, 1))  # two parts of equal weight
      >>> out, lse = pallas_attn.merge_states(outs, lses)
      >>> out.tolist(), round(float(lse[0]), 3)
      ([[0.5, 0.5]], 0.693)
    """
    checks.check_array("outs", outs)
    checks.check_array("lses", lses)
    if outs.ndim < 2 or not outs.shape[0]:
        raise ValueError(f"outs: expected shape [n, ..., D] with n at least 1, got {list(outs.shape)}")
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"lses: expected the shape of outs without its last axis, {outs.shape[:-1]}, got {lses.shape}")
    checks.check_dtype("lses", lses, checks.F32)
    if sinks is not None:
        checks.check_dtype("sinks", sinks, checks.F32)
        if sinks.ndim != 1 or lses.ndim < 2 or sinks.shape[0] != lses.shape[-1]:
            raise ValueError(f"sinks: expected [Hq={lses.shape[-1] if lses.ndim > 1 else 0}], got {list(sinks.shape)}")
    outs, lses, sinks = refuse_gradients("merge_states", (outs, lses, sinks))
    lses = jnp.where(lses == jnp.inf, -jnp.inf, lses)
    highest = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - finite_or_zero(highest)[None])
    total = jnp.sum(weights, axis=0)
    # The output of a part without a visible key is ignored, even if it is NaN. A visible NaN remains: NaN != 0.
    weighted = jnp.where((weights != 0)[..., None], outs.astype(jnp.float32) * weights[..., None], 0.0)
    seen = total != 0
    out = jnp.sum(weighted, axis=0) / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, finite_or_zero(highest) + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    return apply_sinks(out, lse, sinks).astype(outs.dtype), lse


def lse_from_base2(lse: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Convert log-sum-exps from base 2, which FlashInfer returns, to natural logarithms, which this package uses.

    Args:
      lse: float32; infinite values, which mark rows without a visible key, are unchanged.

    Raises:
      ValueError: another dtype.

    Example:
      >>> lse = pallas_attn.lse_from_base2(jnp.array([3.0]))  # of scores whose exponentials sum up to 2**3
      >>> round(float(jnp.exp(lse[0])), 3)
      8.0
    """
    return _scaled("lse_from_base2", lse, math.log(2))


def lse_to_base2(lse: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Convert log-sum-exps from natural logarithms to base 2, which FlashInfer merges.

    Args:
      lse: float32; infinite values are unchanged.

    Raises:
      ValueError: another dtype.

    Example:
      >>> lse = pallas_attn.lse_to_base2(jnp.log(jnp.array([8.0])))
      >>> round(float(lse[0]), 3)
      3.0
    """
    return _scaled("lse_to_base2", lse, math.log2(math.e))


def _scaled(op: str, lse: Float[Array, "*rows"], factor: float) -> Float[Array, "*rows"]:
    checks.check_dtype("lse", lse, checks.F32)
    return refuse_gradients(op, lse) * factor


def apply_sinks(
    out: Float[Array, "*rows D"], lse: Float[Array, "*rows"], sinks: Float[Array, "#heads"] | None
) -> Float[Array, "*rows D"]:
    """Add learned sink logits to the softmax denominator: out · 1 / (1 + exp(sink - lse)). Empty rows stay 0.

    The sinks broadcast against the last axis of `lse`.
    """
    if sinks is None:
        return out
    sinks = sinks.reshape((1,) * (lse.ndim - 1) + sinks.shape)
    share = 1.0 / (1.0 + jnp.exp(sinks - finite_or_zero(lse)))
    return out * jnp.where(lse == -jnp.inf, 0.0, share)[..., None]


def finite_or_zero(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replace -inf, the maximum over no scores, by 0, so that it can be subtracted."""
    return jnp.where(x == -jnp.inf, 0.0, x)
