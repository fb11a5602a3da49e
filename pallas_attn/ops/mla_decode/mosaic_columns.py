"""`mla_decode` on Hopper (H100, H200) for few query rows, where memory is the limit.

Every query head reads the same key, whose first L columns are also the value: all query rows of a sequence are taken
together, as columns of tiles, and a tile of 64 tokens as its rows:

    S [64 tokens, columns] = C qᵀ      O [L, columns] += (C's latent part)ᵀ P      m, l [columns]

so a latent C [64 tokens, L + R] is read once from global memory and used from where it landed for both products, and
wgmma's M of 64 are tokens in one and latent columns in the other, however few the query rows. The latent and the rope
part of a tile are arrays of their own, for O needs the one alone. The rest is that of any decode over pages
(`sm90.decode`), with one KV head and without values beside the keys.

O is what limits the columns: at L 512, 32 of them are half of a program's registers. Query rows beyond that would
become several blocks that each read the cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import tuning
from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90.decode import attend
from pallas_attn.mosaic.sm90.decode_config import MAX_STAGES, SHARED_BYTES, MosaicConfig, reduction_bytes
from pallas_attn.mosaic.sm90.decode_memory import Inputs, Static
from pallas_attn.mosaic.sm90.query_packing import OUTPUT_BYTES, Columns
from pallas_attn.ops.plan_decode import plan_decode
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan, PagedLatent


def decode(
    q_latent: Float[Array, "B Q Hq L"],
    q_rope: Float[Array, "B Q Hq R"],
    cache: PagedLatent,
    block_tables: Int32[Array, "B P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """As `mla_decode`, output and LSE.

    Raises:
      NotImplementedError: not on Hopper, or dtypes, widths, pages or draft masks the kernel does not take.
    """
    _refuse(q_latent, q_rope, cache, draft_mask, out_dtype)
    columns, settings = _sizes(q_latent, q_rope, cache, out_dtype)
    if plan is None:
        plan = plan_decode(
            kv_lens,
            q_lens=real_queries(q_lens, kv_lens, q_latent.shape[1]),
            page_size=cache.page_size,
            num_q_heads=q_latent.shape[2],
            num_kv_heads=1,
            num_programs=settings.programs_per_multiprocessor * basics.multiprocessors(),
        )
    inputs = Inputs(
        q=tuple(columns.pack(q).reshape(1, -1, columns.width, q.shape[-1]) for q in (q_latent, q_rope)),
        k=cache.pages,
        v=None,
        k_scale=None,
        v_scale=None,
        block_tables=block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        plan=plan,
        window=None,
        drafts=None if draft_mask is None else columns.drafts(draft_mask),
        sinks=None,
    )
    static = Static(
        columns=columns,
        raw_queries=False,
        tokens=settings.tile_tokens,
        stages=settings.stages,
        page_size=cache.page_size,
        num_kv_heads=1,
        score_scale=sm_scale,
        soft_cap=None,
        window=None,
        scales=None,
    )
    return attend(inputs, static, jax.ShapeDtypeStruct(q_latent.shape, out_dtype), name="mla_decode")


def decode_programs(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    *,
    out_dtype: jax.typing.DTypeLike,
) -> int:
    """Programs that a plan for such calls should have.

    Raises:
      NotImplementedError: as `decode`.
    """
    _refuse(q_latent, q_rope, cache, None, out_dtype)
    _, settings = _sizes(q_latent, q_rope, cache, out_dtype)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Columns, MosaicConfig]:
    num_queries, num_heads, latent_dim = q_latent.shape[1:]
    columns = Columns(num_heads, num_queries, max_columns(out_dtype))
    key = ColumnsKey(
        latent_dim=latent_dim,
        rope_dim=q_rope.shape[-1],
        columns=columns.width,
        out_bytes=jnp.dtype(out_dtype).itemsize,
        page_size=cache.page_size,
    )
    return columns, columns_config(key)


def _refuse(
    q_latent: Array | jax.ShapeDtypeStruct,
    q_rope: Array | jax.ShapeDtypeStruct,
    cache: PagedLatent,
    draft_mask: Array | None,
    out_dtype: jax.typing.DTypeLike,
) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_hopper()
    num_queries, num_heads, latent_dim = q_latent.shape[1:]
    refusals.require_dtypes(q_latent, cache.pages)
    refusals.require_page_size(cache.page_size)
    if latent_dim % 64 or not 64 <= latent_dim <= 512:
        raise NotImplementedError(f"takes latents of a multiple of 64 columns up to 512, got {latent_dim}")
    if q_rope.shape[-1] not in (32, 64):
        raise NotImplementedError(f"takes 32 or 64 rotated columns, got {q_rope.shape[-1]}")
    if num_heads > max_columns(out_dtype):
        raise NotImplementedError(f"takes at most {max_columns(out_dtype)} query heads, got {num_heads}")
    if draft_mask is not None:
        refusals.require_draft_bits(num_queries)


# --- what can be turned


def max_columns(out_dtype: jax.typing.DTypeLike) -> int:
    """Query rows that the registers of a warpgroup have room for where L is 512, beside writing such outputs. More are
    better off as rows of tiles.
    """
    return 32 if jnp.dtype(out_dtype).itemsize == 2 else 24


TILE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class ColumnsKey:
    """What the best sizes of the kernel depend on.

    Attributes:
      latent_dim, rope_dim: L, R.
      columns: query rows that a program takes at once.
      out_bytes: bytes of a value of the output.
      page_size: ps.
    """

    latent_dim: int
    rope_dim: int
    columns: int
    out_bytes: int
    page_size: int


def columns_config(key: ColumnsKey) -> MosaicConfig:
    """Sizes of the kernel."""
    return tuning.lookup("mla_decode/mosaic_columns", dataclasses.asdict(key), MosaicConfig, lambda: _heuristic(key))


def _heuristic(key: ColumnsKey) -> MosaicConfig:
    """As many programs side by side as registers and shared memory hold, each with two tiles or more."""
    values = key.latent_dim * key.columns
    most = 4 if values <= 2048 else 3 if values <= 3072 else 2 if values <= 8192 else 1
    stage = 2 * TILE_TOKENS * (key.latent_dim + key.rope_dim)
    for programs in range(most, 0, -1):
        stages = (SHARED_BYTES // programs - _bytes_beside_tiles(key)) // stage
        if stages >= 2:
            return MosaicConfig(TILE_TOKENS, min(stages, MAX_STAGES), programs)
    raise NotImplementedError(f"two tiles of {key.latent_dim} + {key.rope_dim} columns do not fit shared memory")


def _bytes_beside_tiles(key: ColumnsKey) -> int:
    """Shared memory a program takes, beside its tiles: arrays come in multiples of 1 KB, and the system takes 1 KB."""
    queries = 2 * key.columns * (key.latent_dim + key.rope_dim)
    probabilities = 2 * key.columns * TILE_TOKENS
    output = min(key.out_bytes * key.columns * key.latent_dim, OUTPUT_BYTES)
    notes = -(-4 * (2 * MAX_STAGES + 2) * key.columns // 1024) * 1024
    barriers, system = 288, 1024
    return queries + probabilities + output + notes + barriers + system + reduction_bytes(key.columns)
