"""Tests of `mla_prefill` with Mosaic kernels, interpreted on a CPU: cases of test_mla_prefill.py, settings, and real
sizes on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_attn import cumulative_lens, gather_latent, merge_states, mla_prefill, ragged_attention
from pallas_attn.ops.mla_prefill.composition import expand, merge
from pallas_attn.ops.mla_prefill.config import PrefixChunkConfig
from pallas_attn.runtime import dispatch
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases
from tests.ops import test_mla_prefill as contract
from tests.ops.test_mla_prefill import BASE, LENGTHS, PS, Inputs

MOSAIC: Any = Variant(("mosaic", "xla"))  # pyrefly: ignore[bad-argument-type]


@pytest.fixture
def interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with harness.interpreting(capsys):
        yield


@slow_cases("one long prefix")
@slow_cases("parts of pages")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["parts of pages", "one long prefix", "prefixes without new tokens"])
def test_contract_cases_agree_with_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_mosaic = {"gather_latent": {("mosaic", (9, 0)): "mosaic"}}
    monkeypatch.setattr(dispatch, "MODULES", dispatch.MODULES | only_mosaic)  # fail if `gather_latent` has no kernel
    cached, new = LENGTHS[name]
    contract.check(MOSAIC, replace(BASE, cached=cached, new=new, dtype="bfloat16", value_scale=harness.HALF_SCALE), PS)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_few_new_tokens_are_absorbed_by_default() -> None:
    """The call has two sequences in pages of 16 tokens, and a sequence without tokens."""
    rng, heads, page_size = harness.fresh_rng(), 5, 16
    cached, new = np.array([37, 0, 18]), np.array([5, 0, 2])
    normal = lambda size, *shape: jnp.asarray(size * rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    call = {
        "q_nope": normal(1.0, 8, heads, 128),
        "q_rope": normal(1.0, 8, heads, 64),
        "latent_new": normal(0.125, 8, 192),
        "w_uk": normal(128**-0.5, heads, 128, 128),
        "w_uv": normal(128**-0.5, heads, 128, 128),
        "cache": contract.PagedLatent(normal(0.125, 12, page_size, 192)),
        "block_tables": jnp.asarray(rng.permutation(12)[:9].reshape(3, 3), jnp.int32),
        "cu_q_lens": cumulative_lens(jnp.asarray(new, jnp.int32)),
        "kv_lens": jnp.asarray(cached + new, jnp.int32),
    }
    attend = jax.jit(lambda call: mla_prefill(**call, sm_scale=0.1, implementation=("mosaic", "xla")))
    assert "mla_decode" in harness.scope_names(attend, call)
    got, want = attend(call), mla_prefill(**call, sm_scale=0.1, absorbed=False, implementation="xla")
    assert not np.asarray(got)[new.sum() :].any()
    harness.assert_close("output", got, want, harness.Tolerance(2e-3, 4 / 128, 2e-5))


# --- expansion of the prefix in several steps, and the merge of their results


def test_merge_agrees_with_merge_states() -> None:
    """The LSEs are near 1e5, so exp of an LSE overflows. Some states have no keys, and one is NaN."""
    rng = harness.fresh_rng()
    outs = rng.standard_normal((2, 6, 3, 8), np.float32)
    lses = (1e5 + rng.standard_normal((2, 6, 3))).astype(np.float32)
    lses[0, 0], lses[1, 1], lses[:, 2] = -np.inf, -np.inf, -np.inf
    outs[lses == -np.inf] = 0
    outs[0, 3, 0], lses[0, 3, 0] = np.nan, np.nan
    got = jax.jit(lambda outs, lses: merge((outs[0], lses[0]), (outs[1], lses[1])))(outs, lses)
    want = merge_states(jnp.asarray(outs), jnp.asarray(lses))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.slow
def test_default_piece_tokens_come_from_the_configuration() -> None:
    """The configured number of tokens that are expanded at a time is visible in the temporary memory."""
    arrays = contract.shapes(64)
    temporaries = {
        tokens: harness.temp_bytes(contract.prefill(Variant("xla", config)), **arrays)
        for tokens, config in ((256, PrefixChunkConfig(256)), (4096, PrefixChunkConfig(4096)))
    }
    expanded = (4096 - 256) * 4 * (32 + 16 + 32) * 4
    assert temporaries[4096] - temporaries[256] >= expanded


def test_piece_tokens_must_be_positive() -> None:
    with pytest.raises(ValueError, match="piece_tokens=0 must be at least 1"):
        PrefixChunkConfig(0)


# --- real sizes, on a GPU


def attend_at_once(
    q_nope, q_rope, latent_new, w_uk, w_uv, cache, block_tables, cu_q_lens, kv_lens, *, sm_scale: float, length: int
) -> Any:
    """Compute attention in float32, with keys and values rounded to bfloat16, as the expected result."""
    latent = gather_latent(cache, latent_new, block_tables, cu_q_lens, kv_lens, length=length, implementation="xla")
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    expanded = expand(wide(latent), wide(w_uk), wide(w_uv))
    k, v = (lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for x in expanded)
    q = wide(jnp.concatenate([q_nope, q_rope], axis=-1))
    return ragged_attention(
        q, k, v, cu_q_lens, cumulative_lens(kv_lens), causal=True, sm_scale=sm_scale, implementation="xla"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", ("mosaic", "xla"), "mosaic"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("absorbed", [False, True, None], ids=["expanded", "absorbed", "default"])
def test_widths_of_deepseek(heads: int, implementation: Any, absorbed: bool | None) -> None:
    """Compare with float32 attention to the same bfloat16 keys and values, for prefixes of various lengths.

    The expected result must round values, too. Without it, one of 8 million outputs exceeds the tolerance: a query that
    sees two values which nearly cancel.
    """
    rng, page_size, num_pages = harness.fresh_rng(), 64, 256
    cached, new = np.array([1000, 0, 4096, 63, 64, 0]), np.array([100, 333, 1, 64, 0, 14])
    normal = lambda size, *shape: jnp.asarray(size * rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    tables = rng.permutation(num_pages)[: 6 * 40].reshape(6, 40)
    tables = np.concatenate([tables, np.full((6, 24), harness.GARBAGE)], axis=1)
    tables[2] = rng.permutation(num_pages)[:64]
    pages = normal(0.5, num_pages, page_size, 576)
    call = {
        "q_nope": normal(1.0, 512, heads, 128),
        "q_rope": normal(1.0, 512, heads, 64),
        "latent_new": normal(0.5, 512, 576),
        "w_uk": normal(512**-0.5, heads, 128, 512),
        "w_uv": normal(512**-0.5, heads, 128, 512),
        "cache": contract.PagedLatent(pages),
        "block_tables": tables.astype(np.int32),
        "cu_q_lens": np.cumsum([0, *new], dtype=np.int32),
        "kv_lens": (cached + new).astype(np.int32),
    }
    options = {"piece_tokens": 1024, "absorbed": absorbed, "implementation": implementation}
    got = jax.jit(lambda call: mla_prefill(**call, sm_scale=0.1, **options))(call)
    want = jax.jit(lambda call: attend_at_once(**call, sm_scale=0.1, length=int(sum(cached + new))))(call)
    assert not np.asarray(got)[new.sum() :].any()
    # The absorbed form rounds queries and outputs in latent space instead of keys and values, so the tolerance is
    # doubled.
    both = 1 if absorbed is False else 2
    harness.assert_close("output", got, want, harness.Tolerance(both * 4e-3, 4 / 128, both * 3e-5))


@pytest.mark.gpu
def test_poison_changes_no_bit_on_a_gpu() -> None:
    """Pages without visible tokens, and queries of no sequence, are poisoned."""
    wide = replace(
        BASE,
        heads=4,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        latent_dim=512,
        dtype="bfloat16",
        value_scale=harness.HALF_SCALE,
    )
    inputs = Inputs.draw(wide, harness.fresh_rng())
    call = contract.prefill(MOSAIC, PS)
    harness.assert_same_bits(call(**inputs.arguments()), call(**inputs.arguments(poisoned=False)))
