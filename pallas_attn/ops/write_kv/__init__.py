"""Write the keys and values of new tokens into a paged cache, after RMSNorm, RoPE and quantisation."""

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

    With `rope`, RMSNorm and RoPE are applied to keys and q in float32. Keys and values are then cast to the cache's
    dtype, or quantised if the cache has scales. All implementations give the same quantised bits for the same input
    (`pallas_attn.portable.quantise`). Their norms and rotations may differ by one unit in the last place.

    Static scales: x is stored as clip(x / scale, -qmax, qmax), rounded half to even for int8, and cast for
    float8_e4m3fn and float8_e5m2. qmax is 127, 448 or 57344.

    Dynamic scales: a scale belongs to one KV head of a page and a group of ps/g tokens. A call assigns the tokens of
    each group that it writes to three classes: new tokens are written by this call; earlier tokens are at offsets below
    the first new token; all other tokens are stale, because a sequence is written in order.

    - The new scale is max(amax / qmax, old scale · (m / qmax)), where amax is the largest magnitude of new tokens and m
      is the largest stored magnitude of earlier tokens. A scale below the smallest normal float32 is replaced by 1.
    - New tokens are quantised with the new scale.
    - Earlier tokens are dequantised with the old scale to float32 and quantised with the new scale. If the scale does
      not change, their bits do not change.
    - Stale tokens do not affect the scale, and are not written.

    A call that writes the first token of a group therefore resets the group's scale.

    Args:
      kv: the cache; see `PagedKV`.
      k, v: new keys and values in bfloat16, float16 or float32.
      slots: [T], page·ps + offset of each token; or, for head-wise tables, [T, Hkv], row·ps + offset of each token and
        head. A row is one page of one KV head (page·Hkv + head), and a head may use the rows of any head. Slots outside
        the pool, such as -1, are not written. All other slots must be distinct. Dynamic scales belong to the row,
        static scales to the head.
      rope: RoPE and RMSNorms; None to write k unchanged.
      q: queries in bfloat16, float16 or float32, to which RMSNorm and RoPE are applied too. Requires `rope`.
      implementation: None, a name, or names to try in order.

    Returns:
      The updated cache or, if q is given, the updated cache and q after RMSNorm and RoPE, in q's dtype.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv = pallas_attn.PagedKV.allocate(spec)
      >>> new, slots = jnp.ones((3, 1, 8)), jnp.array([9, 10, -1], jnp.int32)  # the third token is not written
      >>> kv = pallas_attn.write_kv(kv, new, new, slots)
      >>> kv.k[2, 0, :, 0].tolist()  # page 2 has the slots 8 to 11
      [0.0, 1.0, 1.0, 0.0]
    """
    (slots,) = checks.int32(slots=slots)
    call = WriteKVCall(kv, k, v, slots, rope=rope, q=q)
    call.validate()
    if not call.num_tokens:
        return kv if q is None else (kv, q)
    kv, rotated = dispatch.run(call, implementation)
    return kv if rotated is None else (kv, rotated)
