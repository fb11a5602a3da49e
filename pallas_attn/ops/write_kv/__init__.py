"""Writing new keys and values into their pages, rotated and normed and quantised on the way."""

from __future__ import annotations

from typing import Any, overload

from jaxtyping import Array, Float, Int32

from pallas_attn import checks, dispatch
from pallas_attn.types import Implementation, PagedKV, Rope


def _mosaic() -> Any:
    import pallas_attn.ops.write_kv.mosaic_sm90 as implementation

    return implementation.write_kv


def _xla() -> Any:
    import pallas_attn.ops.write_kv.xla as implementation

    return implementation.write_kv


def _reference() -> Any:
    import pallas_attn.ops.write_kv.reference as implementation

    return implementation.write_kv


IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla, "reference": _reference}


@overload
def write_kv(
    kv: PagedKV,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    *,
    rope: Rope | None = None,
    q: None = None,
    implementation: Implementation = None,
) -> PagedKV: ...


@overload
def write_kv(
    kv: PagedKV,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    *,
    rope: Rope,
    q: Float[Array, "T Hq D"],
    implementation: Implementation = None,
) -> tuple[PagedKV, Float[Array, "T Hq D"]]: ...


def write_kv(
    kv: PagedKV,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    *,
    rope: Rope | None = None,
    q: Float[Array, "T Hq D"] | None = None,
    implementation: Implementation = None,
) -> PagedKV | tuple[PagedKV, Float[Array, "T Hq D"]]:
    """Writes T new tokens' keys and values into their slots; under donation, in place.

    Keys (and q) are normed and rotated in float32 as `rope` says, values never. From float32 they are then cast to the
    cache's dtype or, by the kind of its scales, quantised (`pallas_attn.portable.quantise` has the arithmetic, which
    all implementations follow to the bit; only norm and rotation may differ, by a unit in the last place):

    - Static scales are used as given: x is stored as clip(x / scale, -qmax, qmax), rounded half to even for int8 and
      cast for float8_e4m3fn; qmax is 127 or 448.
    - Dynamic scales belong to groups of ps/g tokens. The group's tokens in this call are reduced together. The tokens
      that count beside them are the group's *earlier* ones, at offsets below the lowest that this call writes; those
      above it that are not written are stale, since a sequence is written in order. Then the group's new scale is the
      larger of amax / qmax, amax being of this call's tokens, and old scale · (m / qmax), m being the largest magnitude
      stored for an earlier token; 1 if neither reaches the smallest normal float32. This call's tokens are quantised
      with it, and each earlier one is re-quantised from float32(stored · old scale), which changes nothing where the
      scale stays. A call that writes a group's first token therefore starts the group afresh. Stale tokens keep their
      bytes and count for nothing.

    Args:
      kv: the cache; see `PagedKV`.
      k, v: bfloat16, float16 or float32.
      slots: page·ps + offset of each token or, for head-wise tables, row·ps + offset of each token and head, in rows of
        any head's pages. Slots outside the pool, -1 among them, write nothing; no two may be equal otherwise. Dynamic
        scales follow the row, static ones the head.
      rope: rotation and norms, or None when k comes ready.
      q: queries to norm and rotate alike, in bfloat16, float16 or float32; needs `rope`.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache or, if q is given, the cache and the rotated q in q's dtype.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    _validate(kv, k, v, slots, rope, q)
    if k.shape[0] == 0:
        return kv if q is None else (kv, q)
    kv, rotated = dispatch.run("write_kv", IMPLEMENTATIONS, implementation, kv, k, v, slots, rope=rope, q=q)
    return kv if rotated is None else (kv, rotated)


def _validate(kv: PagedKV, k: Any, v: Any, slots: Any, rope: Rope | None, q: Any) -> None:
    dims = checks.Dims()
    checks.check_kv(kv, dims)
    dims.check("k", k, "T Hkv D", checks.PLAIN)
    dims.check("v", v, "T Hkv D", checks.PLAIN)
    dims.check("slots", slots, "T Hkv" if slots.ndim == 2 else "T", checks.INT)
    if q is not None:
        if rope is None:
            raise ValueError("q: expected None without rope, there is nothing to do to it")
        dims.check("q", q, "T Hq D", checks.PLAIN)
        checks.check_heads(dims["Hq"], dims["Hkv"])
    if rope is not None:
        _validate_rope(rope, dims, has_q=q is not None)


def _validate_rope(rope: Rope, dims: checks.Dims, *, has_q: bool) -> None:
    dims.check("rope.cos", rope.cos, "T half", checks.F32)
    dims.check("rope.sin", rope.sin, "T half", checks.F32)
    if 2 * dims["half"] > dims["D"]:
        raise ValueError(f"rope.cos: expected at most D/2 = {dims['D'] // 2} columns, got {dims['half']}")
    if rope.q_norm is not None and not has_q:
        raise ValueError("rope.q_norm: expected None without q, there is nothing to norm")
    for name, norm in (("rope.q_norm", rope.q_norm), ("rope.k_norm", rope.k_norm)):
        if norm is not None:
            dims.check(name, norm, "D", checks.PLAIN)
    if rope.style not in ("neox", "interleaved"):
        raise ValueError(f"rope.style: expected 'neox' or 'interleaved', got {rope.style!r}")
    if rope.norm_order not in ("before_rope", "after_rope"):
        raise ValueError(f"rope.norm_order: expected 'before_rope' or 'after_rope', got {rope.norm_order!r}")
    checks.check_positive("rope.norm_eps", rope.norm_eps)
