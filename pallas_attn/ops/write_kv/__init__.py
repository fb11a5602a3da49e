"""Writing new keys and values into their pages, rotated and normed and quantised on the way."""

from __future__ import annotations

from typing import overload

from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedKV, Rope


@overload
def write_kv(
    kv: PagedKV,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv Dv"],
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
    v: Float[Array, "T Hkv Dv"],
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    *,
    rope: Rope,
    q: Float[Array, "T Hq D"],
    implementation: Implementation = None,
) -> tuple[PagedKV, Float[Array, "T Hq D"]]: ...


def write_kv(
    kv: PagedKV,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv Dv"],
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
      cast for float8_e4m3fn and float8_e5m2; qmax is 127, 448 or 57344.
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

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv = pallas_attn.PagedKV.allocate(spec)
      >>> new, slots = jnp.ones((3, 1, 8)), jnp.array([9, 10, -1], jnp.int32)  # the third token is not written
      >>> kv = pallas_attn.write_kv(kv, new, new, slots)
      >>> kv.k[2, 0, :, 0].tolist()  # page 2 holds slots 8 to 11
      [0.0, 1.0, 1.0, 0.0]
    """
    (slots,) = checks.int32(slots=slots)
    call = WriteKVCall(kv, k, v, slots, rope=rope, q=q)
    call.validate()
    if not call.num_tokens:
        return kv if q is None else (kv, q)
    kv, rotated = dispatch.run(call, implementation)
    return kv if rotated is None else (kv, rotated)
