"""Tests with the shapes of DeepSeek models: every implementation supports them, and on a GPU the results are
correct.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import mla_decode, mla_prefill, write_latent
from scripts.bench import shapes
from tests.kit import harness
from tests.kit.harness import VARIANTS
from tests.kit.real_sizes import MLA_SM_SCALE, mla_decode_arrays, mla_prefill_arrays
from tests.kit.slow_cases import slow_cases
from tests.ops.test_real_sizes import as_on_hopper as as_on_hopper
from tests.ops.test_real_sizes import fresh_key, lean

every_decode = pytest.mark.parametrize("case", shapes.MLA_DECODE.values(), ids=shapes.MLA_DECODE)
every_prefill = pytest.mark.parametrize("case", shapes.MLA_PREFILL.values(), ids=shapes.MLA_PREFILL)


@slow_cases("deepseek-v3-mosaic", "deepseek-v3, an eighth of its heads-mosaic")
@pytest.mark.usefixtures("as_on_hopper")
@lean("mla_decode")
@every_decode
def test_decode_shapes_are_supported(variant: harness.Variant, case: shapes.MlaDecode) -> None:
    shapes = jax.eval_shape(lambda: mla_decode_arrays(case, jax.random.key(0)))
    call = harness.compiled(mla_decode, variant, sm_scale=MLA_SM_SCALE, return_lse=True)
    out, lse = jax.eval_shape(call, **shapes)
    assert (out.shape, out.dtype) == (shapes["q_latent"].shape, jnp.bfloat16)
    assert lse.shape == out.shape[:-1]


@slow_cases(
    "deepseek-v3, later chunk-mosaic", "deepseek-v2-lite, many short-mosaic", "deepseek-v2-lite, first chunk-mosaic",
)  # fmt: skip
@pytest.mark.usefixtures("as_on_hopper")
@lean("ragged_attention")
@every_prefill
def test_prefill_shapes_are_supported(variant: harness.Variant, case: shapes.MlaPrefill) -> None:
    shapes = jax.eval_shape(lambda: mla_prefill_arrays(case, jax.random.key(0)))
    out = jax.eval_shape(harness.compiled(mla_prefill, variant, sm_scale=MLA_SM_SCALE), **shapes)
    assert (out.shape, out.dtype) == ((*shapes["q_nope"].shape[:-1], case.value_dim), jnp.bfloat16)


def reference(arrays: dict[str, Any]) -> Any:
    options = {"sm_scale": MLA_SM_SCALE, "return_lse": True, "out_dtype": "float32"}
    return harness.compiled(mla_decode, VARIANTS["reference"], **options)(**arrays)


@pytest.mark.gpu
@lean("mla_decode")
@every_decode
def test_decode_numbers(variant: harness.Variant, case: shapes.MlaDecode) -> None:
    arrays = jax.jit(mla_decode_arrays, static_argnums=0)(case, fresh_key())
    got = harness.compiled(mla_decode, variant, sm_scale=MLA_SM_SCALE, return_lse=True)(**arrays)
    harness.assert_attention_close(got, reference(arrays), variant.tolerance(jnp.bfloat16))


@pytest.mark.gpu
@lean("ragged_attention")
@every_prefill
def test_prefill_numbers(variant: harness.Variant, case: shapes.MlaPrefill) -> None:
    """A sample of the new tokens is compared with `mla_decode` for each of these tokens. The sample has only tokens
    that see many keys, because the tolerances assume that rounding errors average out.
    """
    key = fresh_key()
    arrays = jax.jit(mla_prefill_arrays, static_argnums=0)(case, key)
    out = harness.compiled(mla_prefill, variant, sm_scale=MLA_SM_SCALE)(**arrays)
    sequence, index = jnp.divmod(jnp.arange(out.shape[0]), case.new_tokens)
    position = case.cached_tokens + index
    page, offset = arrays["block_tables"][sequence, position // case.page_size], position % case.page_size
    cache = write_latent(arrays["cache"], arrays["latent_new"], (page * case.page_size + offset).astype(jnp.int32))
    token = jnp.sort(jax.random.choice(key, jnp.flatnonzero(position >= 64), (16,), replace=False))
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
