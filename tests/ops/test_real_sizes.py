"""Tests with the shapes of real models: every implementation supports them, and on a GPU the results are correct."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import PagedKV, paged_decode, paged_prefill
from pallas_attn.runtime import device, dispatch
from scripts.bench import shapes
from scripts.bench.shapes import Decode, Prefill
from tests.kit import harness
from tests.kit.harness import VARIANTS, Variant
from tests.kit.real_sizes import decode_arrays, normal, prefill_arrays, static
from tests.kit.slow_cases import slow_cases

GEMMA4_DECODE = {
    "local": Decode(32, 8192, 32, 16, 256, window=1024),
    "global": Decode(16, 8192, 32, 4, 512),
    "global, 2 drafts": Decode(16, 8192, 32, 4, 512, queries=3),
    "global, pages of 16": Decode(16, 8192, 16, 2, 512, page_size=16),
    "global, long context": Decode(1, 131072, 16, 2, 512),
}
GEMMA4_PREFILL = {
    "local": Prefill(1, 2048, 2048, 32, 16, 256, window=1024),
    "global": Prefill(1, 2048, 2048, 32, 4, 512),
    "global, many short": Prefill(64, 64, 1024, 16, 2, 512, page_size=16),
}
"""Calls of Gemma 4, whose heads have 256 or 512 columns. Mosaic kernels for 512 columns exist for decode on Hopper."""


def lean(op: str) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with each implementation and its default configuration. The reference is left
    out, because it stores all scores, which need more memory than a GPU has.
    """
    names = set(dispatch.implementations(op)) - {"reference"}
    return pytest.mark.parametrize("variant", [pytest.param(Variant(name), id=name) for name in sorted(names)])


every_decode = pytest.mark.parametrize("case", shapes.DECODE.values(), ids=shapes.DECODE)
every_prefill = pytest.mark.parametrize("case", shapes.PREFILL.values(), ids=shapes.PREFILL)


def fresh_key() -> jax.Array:
    return jax.random.key(int(harness.fresh_rng().integers(2**32)))


# --- on any machine


@pytest.fixture
def as_on_hopper() -> Iterator[None]:
    """Trace Mosaic kernels for the interpreter, which needs no GPU. The tests only trace calls."""
    with plgpu.force_gpu_interpret_mode():
        yield


@slow_cases("llama-3-8b-mosaic", "gemma-3-4b, local-mosaic", "gpt-oss-120b, full-mosaic")
@pytest.mark.usefixtures("as_on_hopper")
@lean("paged_decode")
@every_decode
def test_decode_shapes_are_supported(variant: Variant, case: shapes.Decode) -> None:
    shapes = jax.eval_shape(lambda: decode_arrays(case, jax.random.key(0)))
    call = harness.compiled(paged_decode, variant, return_lse=True, **static(case))
    out, lse = jax.eval_shape(call, **shapes)
    assert (out.shape, out.dtype) == (shapes["q"].shape, jnp.bfloat16)
    assert lse.shape == shapes["q"].shape[:-1]


@slow_cases("llama-3-8b, many short-mosaic")
@pytest.mark.usefixtures("as_on_hopper")
@lean("paged_prefill")
@every_prefill
def test_prefill_shapes_are_supported(variant: Variant, case: shapes.Prefill) -> None:
    shapes = jax.eval_shape(lambda: prefill_arrays(case, jax.random.key(0)))
    call = harness.compiled(paged_prefill, variant, return_lse=True, **static(case))
    out, lse = jax.eval_shape(call, **shapes)
    assert (out.shape, out.dtype) == (shapes["q"].shape, jnp.bfloat16)
    assert lse.shape == shapes["q"].shape[:-1]


# --- on a GPU


def reference(case: shapes.Decode | shapes.Prefill, arrays: dict[str, Any]) -> Any:
    call = harness.compiled(paged_decode, VARIANTS["reference"], return_lse=True, out_dtype="float32", **static(case))
    return call(**arrays)


@pytest.mark.gpu
@lean("paged_decode")
@every_decode
def test_decode_numbers(variant: Variant, case: shapes.Decode) -> None:
    check_decode(variant, case)


@pytest.mark.gpu
@lean("paged_decode")
@pytest.mark.parametrize("case", GEMMA4_DECODE.values(), ids=GEMMA4_DECODE)
def test_decode_numbers_of_wide_heads(variant: Variant, case: Decode) -> None:
    if variant.implementation == "mosaic" and case.head_dim > 256 and device.current().capability != (9, 0):
        pytest.skip("Mosaic kernels for heads of 512 columns are for Hopper")
    check_decode(variant, case)


def check_decode(variant: Variant, case: Decode) -> None:
    arrays = jax.jit(decode_arrays, static_argnums=0)(case, fresh_key())
    got = harness.compiled(paged_decode, variant, return_lse=True, **static(case))(**arrays)
    harness.assert_attention_close(got, reference(case, arrays), variant.tolerance(jnp.bfloat16))


@pytest.mark.gpu
@lean("paged_prefill")
@every_prefill
def test_prefill_numbers(variant: Variant, case: shapes.Prefill) -> None:
    check_prefill(variant, case)


@pytest.mark.gpu
@lean("paged_prefill")
@pytest.mark.parametrize("case", GEMMA4_PREFILL.values(), ids=GEMMA4_PREFILL)
def test_prefill_numbers_of_wide_heads(variant: Variant, case: Prefill) -> None:
    if variant.implementation == "mosaic" and case.head_dim > 256:
        pytest.skip("no Mosaic prefill kernel has heads of 512 columns")
    check_prefill(variant, case)


def check_prefill(variant: Variant, case: Prefill) -> None:
    """Compare a sample of the new tokens with `paged_decode` for each of these tokens."""
    key = fresh_key()
    arrays = jax.jit(prefill_arrays, static_argnums=0)(case, key)
    out, lse = harness.compiled(paged_prefill, variant, return_lse=True, **static(case))(**arrays)
    token = jnp.sort(jax.random.choice(key, arrays["q"].shape[0], (32,), replace=False))
    sequence, index = jnp.divmod(token, case.new_tokens)
    steps = {
        "q": arrays["q"][token][:, None],
        "kv_lens": (case.cached_tokens + index + 1).astype(jnp.int32),
        "block_tables": arrays["block_tables"][sequence],
        "kv": arrays["kv"],
        "sinks": arrays.get("sinks"),
    }
    want_out, want_lse = reference(case, steps)
    want = want_out[:, 0], want_lse[:, 0]
    harness.assert_attention_close((out[token], lse[token]), want, variant.tolerance(jnp.bfloat16))


@pytest.mark.gpu
@lean("paged_decode")
@pytest.mark.parametrize("head_wise", [False, True])
def test_a_pool_beyond_32_bit_offsets(variant: Variant, head_wise: bool) -> None:
    """Pages at the end of a pool with more than 2**32 elements give the same result as the same pages in a small
    pool.
    """
    num_pages, num_kv_heads, page_size, head_dim, pages = 2**16 + 512, 8, 64, 128, 16
    k, v, q = jax.random.split(fresh_key(), 3)
    small = PagedKV(*[normal(x, (2 * pages, num_kv_heads, page_size, head_dim)) for x in (k, v)])
    assert num_pages * num_kv_heads * page_size * head_dim > 2**32

    @jax.jit
    def at_the_end(small: jax.Array) -> jax.Array:
        large = jnp.zeros((num_pages, *small.shape[1:]), small.dtype)
        return jax.lax.dynamic_update_slice(large, small, (num_pages - 2 * pages, 0, 0, 0))

    large = jax.tree.map(at_the_end, small)
    table = jnp.arange(2 * pages, dtype=jnp.int32).reshape(2, pages)
    offset = num_pages - 2 * pages
    if head_wise:
        table = table[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        offset *= num_kv_heads
    rest = {
        "q": normal(q, (2, 1, 32, head_dim)),
        "kv_lens": jnp.array([pages * page_size, 700], jnp.int32),
    }
    call = harness.compiled(paged_decode, variant, return_lse=True)
    want = call(kv=small, block_tables=table, **rest)
    got = call(kv=large, block_tables=table + offset, **rest)
    harness.assert_attention_close(got, want, variant.tolerance(jnp.bfloat16))
