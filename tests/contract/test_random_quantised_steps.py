"""Random calls of `ragged_paged_attention` over int8 and fp8 caches. Results of `xla` and `triton` are compared with
`reference`.

Calls run in four ways: plainly, with a donated cache, with `jax_enable_x64`, and with heads split over two devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import HeadWindow, PagedKV, kv_cache_spec, ragged_paged_attention
from pallas_attn.types import QMAX
from tests.kit import harness

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@dataclasses.dataclass(frozen=True)
class QuantisedStep:
    """A random call: its array arguments, its static arguments, and the cache slots that have a token after the call
    (bool [N, ps]).
    """

    arrays: dict[str, Any]
    static: dict[str, Any]
    held: np.ndarray


def draw(rng: np.random.Generator, *, kernels: bool = False, even_heads: bool = False) -> QuantisedStep:
    """Draw sizes, lengths, dtypes, scales and options.

    Args:
      kernels: draw only dtypes that Triton kernels support.
      even_heads: draw an even number of KV heads.
    """
    num_seqs, table_pages, page_size = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.choice([8, 16]))
    kv_heads, group, dim = (
        int(rng.choice([2, 4] if even_heads else [1, 2, 4])),
        int(rng.choice([1, 2, 3])),
        int(rng.choice([32, 64])),
    )
    value_dim = int(rng.choice([dim, dim, 32]))
    dtype = jnp.dtype(rng.choice(["int8", "float8_e4m3fn", "float8_e5m2"][: 2 if kernels else 3]))
    scales = ("head", "channel", 1, page_size // 4, page_size)[rng.integers(5)]
    q_dtype = str(rng.choice(["bfloat16", "float16", "float32"][: 2 if kernels else 3]))
    capacity = table_pages * page_size
    lens = rng.integers(0, capacity + 1, num_seqs)
    new = np.minimum(lens, rng.choice([0, 1, 1, 2, 7, 20], num_seqs))
    tokens = int(new.sum() + rng.integers(0, 9)) or 1
    num_pages = num_seqs * table_pages + int(rng.integers(1, 4))
    spec = kv_cache_spec(
        num_pages=num_pages, page_size=page_size, num_kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, dtype=dtype,
        scales=scales,
    )  # fmt: skip
    tables = rng.permutation(num_pages)[: num_seqs * table_pages].reshape(num_seqs, table_pages).astype(np.int32)
    held = np.zeros((num_pages, page_size), bool)
    for row, length in zip(tables, lens, strict=True):
        token = np.arange(length)
        held[row[token // page_size], token % page_size] = True
        row[-(-length // page_size) :] = harness.GARBAGE
    arrays: dict[str, np.ndarray] = {}
    for name, array in spec.arrays.items():
        if name.endswith("_scale"):
            arrays[name] = rng.uniform(0.002, 0.03, array.shape).astype(np.float32)
        elif array.dtype == np.int8:
            arrays[name] = rng.integers(-127, 128, array.shape).astype(np.int8)
        else:
            limit = 100.0 if dtype != ml_dtypes.float8_e5m2 else 1000.0
            arrays[name] = (limit * rng.standard_normal(array.shape)).clip(-QMAX[dtype], QMAX[dtype]).astype(dtype)
    padding = np.arange(tokens) >= new.sum()

    def packed(heads: int, width: int) -> np.ndarray:
        x = rng.standard_normal((tokens, heads, width)).astype(q_dtype)
        return harness.poison(rng, x, padding)

    step: dict[str, Any] = {
        "q": packed(kv_heads * group, dim),
        "k": packed(kv_heads, dim),
        "v": packed(kv_heads, value_dim),
        "kv": PagedKV(**{name: jnp.asarray(x) for name, x in arrays.items()}),
        "kv_lens": lens.astype(np.int32),
        "page_indices": tables if rng.random() < 0.5 else tables.reshape(-1),
        "cu_q_lens": np.concatenate([[0], new.cumsum()]).astype(np.int32),
    }
    static: dict[str, Any] = {"sm_scale": float(dim**-0.5), "out_dtype": "float32"}
    if rng.random() < 0.3:
        static["soft_cap"] = float(rng.choice([1.0, 30.0]))
    if rng.random() < 0.3:
        step["attention_sink"] = rng.standard_normal(kv_heads * group).astype(np.float32)
    if rng.random() < 0.4:
        static["sliding_window"] = int(rng.integers(1, capacity + 3))
    elif rng.random() < 0.3:
        window, sink_tokens = rng.integers(1, capacity + 3, kv_heads), rng.integers(0, 9, kv_heads)
        step["sliding_window"] = HeadWindow(jnp.asarray(window, jnp.int32), jnp.asarray(sink_tokens, jnp.int32))
    elif rng.random() < 0.2:
        static["causal"] = False
    if rng.random() < 0.3:
        decodes = next((s for s, n in enumerate(new) if n != 1), num_seqs)
        step["distribution"] = np.array([decodes, decodes, num_seqs], np.int32)
    if scales in ("head", "channel") and rng.random() < 0.3:
        by_channel = rng.random() < 0.4
        for name, width in (("k_scale", dim), ("v_scale", value_dim)):
            shape = (kv_heads, width) if by_channel else ((), (kv_heads,))[rng.integers(2)]
            step[name] = np.asarray(rng.uniform(0.002, 0.03, shape), np.float32)
    return QuantisedStep(step, static, held)


def run(step: QuantisedStep, implementation: str, how: str = "plain") -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return output and cache of the jitted call, run in one of the ways of `WAYS`."""
    function = functools.partial(ragged_paged_attention, implementation=implementation, **step.static)
    arrays = jax.tree.map(jnp.array, step.arrays)  # copies, because the call may donate them
    with contextlib.ExitStack() as stack:
        if how == "x64":
            stack.enter_context(jax.enable_x64(True))
        if how == "mesh":
            mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
            arrays = {name: jax.device_put(x, split(name, x, mesh)) for name, x in arrays.items()}
        donated = ("kv",) if how == "donated" else ()
        out, kv = jax.jit(lambda **given: function(**given), donate_argnames=donated)(**arrays)
    if how == "mesh":
        assert not kv.k.sharding.is_fully_replicated
    if how == "donated":
        assert all(leaf.is_deleted() for leaf in (arrays["kv"].k, arrays["kv"].v))
    fields = {field.name: getattr(kv, field.name) for field in dataclasses.fields(kv)}
    return np.asarray(out), {name: np.asarray(x) for name, x in fields.items() if isinstance(x, jax.Array)}


def split(name: str, x: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the shardings of an argument, with query and KV heads split over a mesh."""
    specs = {"q": P(None, "x"), "k": P(None, "x"), "v": P(None, "x"), "attention_sink": P("x")}

    def of(leaf: jax.Array) -> NamedSharding:
        if name == "kv":
            spec = P("x") if leaf.ndim < 3 else P(None, "x")
        elif name in ("k_scale", "v_scale", "sliding_window"):
            spec = P("x") if leaf.ndim else P()
        else:
            spec = specs.get(name, P())
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, x)


def check(step: QuantisedStep, implementation: str, how: str) -> None:
    """Compare output and cache with `reference`, and check that cache slots without a token are unchanged."""
    out, cache = run(step, implementation, how)
    want, want_cache = run(step, "reference")
    rounded = step.arrays["q"].dtype != np.float32
    tolerance = harness.HALF_OUT if rounded else harness.F32_OUT
    harness.assert_close("output", out, want, dataclasses.replace(tolerance, absolute=0.05 if rounded else 5e-4))
    before = step.arrays["kv"]
    for name in ("k", "v"):
        got_bits, want_bits = (np.moveaxis(x[name], 1, 2).view(np.uint8) for x in (cache, want_cache))
        old = np.moveaxis(np.asarray(getattr(before, name)), 1, 2).view(np.uint8)
        np.testing.assert_array_equal(got_bits[~step.held], old[~step.held])
        np.testing.assert_array_equal(got_bits, want_bits)
    assert cache.keys() == want_cache.keys()
    for name in cache.keys() - {"k", "v"}:
        np.testing.assert_allclose(cache[name], want_cache[name], rtol=1e-6)


WAYS = ("plain", "donated", "x64", "mesh")


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_random_steps(implementation: str, how: str) -> None:
    if how == "mesh" and (implementation == "triton" or jax.device_count() < 2):
        pytest.skip("needs two devices; interpreted kernels support split arrays only inside jax.shard_map")
    rng = harness.fresh_rng()
    for number in range(12 if implementation == "xla" else 5):
        step = draw(rng, kernels=implementation == "triton", even_heads=how == "mesh")
        print(f"call {number}: {jax.tree.map(np.shape, step.arrays)}, {step.arrays['kv'].k.dtype}, {step.static}")
        check(step, implementation, how)


def with_head_scales(seed: int) -> QuantisedStep:
    """Return a random call with an even number of KV heads. Its arguments `k_scale` and `v_scale` have a scale per
    head.
    """
    rng = np.random.default_rng(seed)
    while True:
        step = draw(rng, even_heads=True)
        kv_heads = step.arrays["kv"].k.shape[1]
        if getattr(step.arrays["kv"].k_scale, "ndim", 0) < 3:
            scales = {name: np.linspace(0.01, 0.03, kv_heads, dtype=np.float32) for name in ("k_scale", "v_scale")}
            return dataclasses.replace(step, arrays=step.arrays | scales)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_scales_of_heads_split_over_devices() -> None:
    """`k_scale` and `v_scale` are split over devices in the same way as the KV heads."""
    check(with_head_scales(1), "xla", "mesh")


@pytest.mark.slow
def test_token_groups_with_64_bits() -> None:
    """A call with scales per group of tokens works with `jax_enable_x64`. New tokens join groups with earlier tokens,
    and the loop over these groups must count in int32.
    """
    rng = np.random.default_rng(2)
    while True:
        step = draw(rng)
        scale, lens = step.arrays["kv"].k_scale, step.arrays["kv_lens"]
        new = np.diff(step.arrays["cu_q_lens"])
        if scale.ndim == 3 and 1 < scale.shape[2] < step.arrays["kv"].page_size and (lens > new).any() and new.any():
            break
    check(step, "xla", "x64")
