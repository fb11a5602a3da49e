"""DeepSeek's shapes: that every implementation takes them, and on a GPU that their numbers are right."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import PagedLatent, mla_decode, mla_prefill, write_latent
from pallas_attn.ops import mla_decode as decode_module
from pallas_attn.ops import ragged_attention as prefill_module
from tests import cases
from tests.ops import harness
from tests.ops.harness import VARIANTS
from tests.ops.test_real_sizes import as_on_hopper as as_on_hopper
from tests.ops.test_real_sizes import fresh_key, lean, normal

SM_SCALE = 192**-0.5
SIZE = 0.25  # of latents; the tolerances, FlashMLA's, are for values like these, and queries make up for it

every_decode = pytest.mark.parametrize("case", cases.MLA_DECODE.values(), ids=cases.MLA_DECODE)
every_prefill = pytest.mark.parametrize("case", cases.MLA_PREFILL.values(), ids=cases.MLA_PREFILL)

type Case = cases.MlaDecode | cases.MlaPrefill


def paged(case: Case, sequences: int, longest: int, key: jax.Array) -> dict[str, Any]:
    """Every page of every sequence somewhere in the pool."""
    pages, ids = jax.random.split(key)
    pages_per_row = math.ceil(longest / case.page_size)
    num_pages = 1 + sequences * pages_per_row
    ids = 1 + jax.random.permutation(ids, num_pages - 1).astype(jnp.int32)
    shape = (num_pages, case.page_size, case.latent_dim + case.rope_dim)
    return {"cache": PagedLatent(normal(pages, shape, SIZE)), "block_tables": ids.reshape(sequences, pages_per_row)}


def decode_arrays(case: cases.MlaDecode, key: jax.Array) -> dict[str, Any]:
    q, rope, lens, pool = jax.random.split(key, 4)
    return {
        "q_latent": normal(q, (case.batch, case.queries, case.heads, case.latent_dim), 1 / SIZE),
        "q_rope": normal(rope, (case.batch, case.queries, case.heads, case.rope_dim), 1 / SIZE),
        "kv_lens": jax.random.randint(lens, (case.batch,), case.queries, case.context + 1, jnp.int32),
        **paged(case, case.batch, case.context, pool),
    }


def prefill_arrays(case: cases.MlaPrefill, key: jax.Array) -> dict[str, Any]:
    q, rope, new, w_uk, w_uv, pool = jax.random.split(key, 6)
    tokens, length = case.sequences * case.new_tokens, case.cached_tokens + case.new_tokens
    return {
        "q_nope": normal(q, (tokens, case.heads, case.nope_dim), 1 / SIZE),
        "q_rope": normal(rope, (tokens, case.heads, case.rope_dim), 1 / SIZE),
        "latent_new": normal(new, (tokens, case.latent_dim + case.rope_dim), SIZE),
        "w_uk": normal(w_uk, (case.heads, case.nope_dim, case.latent_dim), case.latent_dim**-0.5),
        "w_uv": normal(w_uv, (case.heads, case.value_dim, case.latent_dim), case.latent_dim**-0.5),
        "cu_q_lens": jnp.arange(case.sequences + 1, dtype=jnp.int32) * case.new_tokens,
        "kv_lens": jnp.full((case.sequences,), length, jnp.int32),
        **paged(case, case.sequences, length, pool),
    }


@pytest.mark.usefixtures("as_on_hopper")
@lean(decode_module.IMPLEMENTATIONS)
@every_decode
def test_decode_shapes_are_supported(variant: harness.Variant, case: cases.MlaDecode) -> None:
    shapes = jax.eval_shape(lambda: decode_arrays(case, jax.random.key(0)))
    call = harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, return_lse=True)
    out, lse = jax.eval_shape(call, **shapes)
    assert (out.shape, out.dtype) == (shapes["q_latent"].shape, jnp.bfloat16)
    assert lse.shape == out.shape[:-1]


@pytest.mark.usefixtures("as_on_hopper")
@lean(prefill_module.IMPLEMENTATIONS)
@every_prefill
def test_prefill_shapes_are_supported(variant: harness.Variant, case: cases.MlaPrefill) -> None:
    shapes = jax.eval_shape(lambda: prefill_arrays(case, jax.random.key(0)))
    out = jax.eval_shape(harness.compiled(mla_prefill, variant, sm_scale=SM_SCALE), **shapes)
    assert (out.shape, out.dtype) == ((*shapes["q_nope"].shape[:-1], case.value_dim), jnp.bfloat16)


def reference(arrays: dict[str, Any]) -> Any:
    options = {"sm_scale": SM_SCALE, "return_lse": True, "out_dtype": "float32"}
    return harness.compiled(mla_decode, VARIANTS["reference"], **options)(**arrays)


@pytest.mark.gpu
@lean(decode_module.IMPLEMENTATIONS)
@every_decode
def test_decode_numbers(variant: harness.Variant, case: cases.MlaDecode) -> None:
    arrays = jax.jit(decode_arrays, static_argnums=0)(case, fresh_key())
    got = harness.compiled(mla_decode, variant, sm_scale=SM_SCALE, return_lse=True)(**arrays)
    harness.assert_attention_close(got, reference(arrays), variant.tolerance(jnp.bfloat16))


@pytest.mark.gpu
@lean(prefill_module.IMPLEMENTATIONS)
@every_prefill
def test_prefill_numbers(variant: harness.Variant, case: cases.MlaPrefill) -> None:
    """A sample of the chunk's tokens, each compared with the absorbed decode step it would have been."""
    key = fresh_key()
    arrays = jax.jit(prefill_arrays, static_argnums=0)(case, key)
    out = harness.compiled(mla_prefill, variant, sm_scale=SM_SCALE)(**arrays)
    sequence, index = jnp.divmod(jnp.arange(out.shape[0]), case.new_tokens)
    position = case.cached_tokens + index
    page, offset = arrays["block_tables"][sequence, position // case.page_size], position % case.page_size
    cache = write_latent(arrays["cache"], arrays["latent_new"], (page * case.page_size + offset).astype(jnp.int32))
    token = jnp.sort(jax.random.choice(key, out.shape[0], (16,), replace=False))
    w_uk, w_uv, q = (arrays[name].astype(jnp.float32) for name in ("w_uk", "w_uv", "q_nope"))
    absorbed, _ = reference(
        {
            "q_latent": jnp.einsum("bhn,hnl->bhl", q[token], w_uk, precision="highest")[:, None],
            "q_rope": arrays["q_rope"][token, None].astype(jnp.float32),
            "cache": cache,
            "block_tables": arrays["block_tables"][sequence[token]],
            "kv_lens": position[token].astype(jnp.int32) + 1,
        }
    )
    want = jnp.einsum("bhl,hvl->bhv", absorbed[:, 0], w_uv, precision="highest")
    harness.assert_close("output", out[token], want, variant.tolerance(jnp.bfloat16)[0])
