"""Write new keys and values into their pages, after norm, rotation and quantisation."""

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
    """Write the keys and values of T new tokens into their slots; in place if the cache is donated.

    Keys and q are normed and rotated in float32 according to `rope`. Values are not. Keys and values are then cast to
    the cache's dtype, or quantised if the cache has scales. All implementations quantise with identical bits
    (`pallas_attn.portable.quantise`). Their norms and rotations may differ by one unit in the last place.

    Static scales: x is stored as clip(x / scale, -qmax, qmax), rounded half to even for int8, and cast for
    float8_e4m3fn and float8_e5m2. qmax is 127, 448 or 57344.

    Dynamic scales: a scale belongs to a group of ps/g tokens of a page. For each group that the call writes to:

    - New tokens are the group's tokens in this call. Earlier tokens are at offsets below the lowest new token. Other
      tokens are stale, because sequences are written in order. Stale tokens do not affect the scale and are unchanged.
    - The new scale is max(amax / qmax, old scale · (m / qmax)), where amax is the largest magnitude of new tokens and m
      the largest stored magnitude of earlier tokens. A scale below the smallest normal float32 is replaced by 1.
    - New tokens are quantised with the new scale. Earlier tokens are requantised from float32(stored · old scale),
      which changes no bits if the scale is unchanged.

    A call that writes a group's first token therefore resets the group.

    Args:
      kv: the cache; see `PagedKV`.
      k, v: bfloat16, float16 or float32.
      slots: page · ps + offset of each token. For head-wise tables: pool row · ps + offset of each token and head,
        where the pool row may belong to any head. Slots outside the pool, such as -1, write nothing. All other slots
        must be distinct. Dynamic scales are stored with the pool row, static scales belong to the head.
      rope: rotation and norms; None if k needs neither.
      q: queries to norm and rotate in the same way, in bfloat16, float16 or float32; requires `rope`.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache or, if q is given, the cache and the rotated q in q's dtype.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the named implementation does not support the call.

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
