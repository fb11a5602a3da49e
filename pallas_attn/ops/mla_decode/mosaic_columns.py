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
from jaxtyping import Array, Float

from pallas_attn import tuning
from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90.decode import attend
from pallas_attn.mosaic.sm90.decode_config import MAX_STAGES, SHARED_BYTES, MosaicConfig, reduction_bytes
from pallas_attn.mosaic.sm90.decode_memory import Inputs, Static
from pallas_attn.mosaic.sm90.query_packing import OUTPUT_BYTES, Columns
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.types import DecodePlan


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """As `mla_decode`, output and LSE."""
    columns, settings = _sizes(call)
    inputs = Inputs(
        q=tuple(columns.pack(q).reshape(1, -1, columns.width, q.shape[-1]) for q in (call.q_latent, call.q_rope)),
        k=call.cache.pages,
        v=None,
        k_scale=None,
        v_scale=None,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        window=None,
        drafts=None if call.draft_mask is None else columns.drafts(call.draft_mask),
        sinks=None,
    )
    static = Static(
        columns=columns,
        raw_queries=False,
        tokens=settings.tile_tokens,
        stages=settings.stages,
        page_size=call.page_size,
        num_kv_heads=1,
        score_scale=call.sm_scale,
        soft_cap=None,
        window=None,
        scales=None,
    )
    return attend(inputs, static, jax.ShapeDtypeStruct(call.q_latent.shape, call.output_dtype), name="mla_decode")


def num_programs(call: MlaDecodeCall) -> int:
    """Programs that a plan for such calls should have.

    Raises:
      NotImplementedError: not on Hopper, or dtypes, widths, pages or draft masks the kernel does not take.
    """
    _refuse(call)
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: MlaDecodeCall) -> tuple[Columns, MosaicConfig]:
    columns = Columns(call.num_heads, call.num_queries, max_columns(call.output_dtype))
    key = ColumnsKey(
        latent_dim=call.latent_dim,
        rope_dim=call.rope_dim,
        columns=columns.width,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.page_size,
    )
    return columns, columns_config(key)


def _refuse(call: MlaDecodeCall) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_capability((9, 0))
    latent_dim, num_heads, most = call.latent_dim, call.num_heads, max_columns(call.output_dtype)
    refusals.require_dtypes(call.q_latent, call.cache.pages)
    refusals.require_page_size(call.page_size)
    if latent_dim % 64 or not 64 <= latent_dim <= 512:
        raise NotImplementedError(f"takes latents of a multiple of 64 columns up to 512, got {latent_dim}")
    if call.rope_dim not in (32, 64):
        raise NotImplementedError(f"takes 32 or 64 rotated columns, got {call.rope_dim}")
    if num_heads > most:
        raise NotImplementedError(f"takes at most {most} query heads, got {num_heads}")
    if call.draft_mask is not None:
        refusals.require_draft_bits(call.num_queries)


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
