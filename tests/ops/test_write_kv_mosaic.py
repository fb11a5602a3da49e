"""Tests of the Mosaic kernel of `write_kv` in addition to its contract suite (test_write_kv.py)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedKV, Rope, explain, kv_cache_spec
from pallas_attn.ops.write_kv import mosaic_rounding
from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.ops.write_kv.config import WriteKVConfig, WriteKVKey, mosaic_config
from pallas_attn.ops.write_kv.mosaic import WriteKVStatic
from pallas_attn.ops.write_kv.mosaic_rounding import Arithmetic, Divisor, refined_quotient
from pallas_attn.portable import quantise
from tests.kit import harness
from tests.kit.harness import Variant, any_bits, assert_same_bits, fresh_rng
from tests.ops.write_kv_case import HEADS, NUM_TOKENS, PAGE_SIZE, WIDTH, numpy_write, stale_cache, tokens, write

# Each CTA writes few entries, so that a call has many CTAs, and several CTAs have tokens of one scale group.
MOSAIC = Variant("mosaic", WriteKVConfig(row_threads=32, scan_tokens=2))
KERNEL, XLA = Variant("mosaic"), Variant("xla")
FP8 = "float8_e4m3fn"


@pytest.fixture
def interpreter(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Iterator[None]:
    """Interpret kernels. The parameter of the fixture, if any, has parameters of the interpreter."""
    with harness.interpreting(capsys, **getattr(request, "param", {})):
        yield


@pytest.mark.parametrize("interpreter", [{"uninitialized_memory": "zero"}], indirect=True)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_chunk_in_random_order(interpreter: None, fused: bool) -> None:
    """Several CTAs have tokens of one scale group. The kernel records which token writes each slot. Records of slots
    that no token writes are uninitialised; the interpreter fills them with 0, a valid token index, which must not
    matter.
    """
    rng = fresh_rng()
    kv = stale_cache(rng, "int8", 2)
    for start in (0, 6, 3):  # the third call overwrites tokens, as after a rejected draft
        slots = jnp.asarray(2 * PAGE_SIZE + start + rng.permutation(NUM_TOKENS), jnp.int32)
        k, v = tokens(rng, spread=2.0)
        want = numpy_write(kv, k, v, slots)
        if fused:
            joined = dataclasses.replace(kv, k=jnp.concatenate([kv.k, kv.v], axis=-1), v=None)
            written = write(MOSAIC, joined, k, v, slots)
            kv = dataclasses.replace(written, k=written.k[..., :WIDTH], v=written.k[..., WIDTH:])
        else:
            kv = write(MOSAIC, kv, k, v, slots)
        assert_same_bits(kv, want)


# --- arithmetic with GPU instructions that the interpreter does not support


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """Compute a * b + c, rounded once to float32. The float64 sum is rounded to odd, so that rounding it to float32
    equals rounding the exact sum.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b  # exact
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    with np.errstate(invalid="ignore"):
        even = (total.view(np.int64) & 1) == 0
        away = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, away), total).astype(np.float32)


NUMPY = Arithmetic(np.multiply, fma, np.negative)


def guessed_reciprocal(rng: np.random.Generator, x: Any) -> np.ndarray:
    """Return 1 / x in float32 with a random error of up to one unit in the last place, like `rcp.approx`."""
    exact = np.float32(1) / np.asarray(x, np.float32)
    return (exact.view(np.int32) + rng.integers(-1, 2, exact.shape, np.int32)).view(np.float32)


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> np.random.Generator:
    """Replace the GPU instructions by numpy functions. Return the random generator of their errors."""
    rng = fresh_rng()
    instructions = {
        "rcp.approx.ftz.f32": lambda x: guessed_reciprocal(rng, x),
        "cvt.rni.s32.f32": lambda x: np.rint(x).astype(np.int32),
    }
    monkeypatch.setattr(mosaic_rounding, "interpreted", lambda: False)
    monkeypatch.setattr(mosaic_rounding, "MLIR", NUMPY)
    monkeypatch.setattr(mosaic_rounding, "_instruction", instructions.__getitem__)
    apply = lambda f, _, *x, dtype=jnp.float32: jnp.asarray(f(*map(np.asarray, x)), dtype)  # noqa: E731
    monkeypatch.setattr(mosaic_rounding, "_elementwise", apply)
    return rng


def test_quotients_are_correctly_rounded(on_numpy: np.random.Generator) -> None:
    """The mantissas have few or many bits set. Quotients of such numbers are closest to ties, which are the hardest to
    round correctly.
    """
    rng, shape = on_numpy, (2, 200_000)
    mantissas = rng.choice([0, 2**23 - 1], shape) ^ rng.integers(0, 2 ** rng.integers(0, 24, shape))
    x, y = (mantissas + (127 << 23)).astype(np.int32).view(np.float32)
    x = x * np.exp2(rng.integers(-12, 9, x.shape)).astype(np.float32)
    divisor = Divisor.of(jnp.asarray(y), jnp.int8, None)
    assert_same_bits(divisor.normal, y)
    assert_same_bits(divisor.reciprocal, 1 / y)
    assert_same_bits(refined_quotient(NUMPY, x, y, np.asarray(divisor.reciprocal)), x / y)


@pytest.mark.parametrize("dtype", ["int8", FP8])
def test_quantised_bytes_equal_portable(dtype: str, on_numpy: np.random.Generator) -> None:
    """The inputs have scales of all magnitudes, values out of range, and values near ties."""
    rng = on_numpy
    scale = np.exp2(rng.uniform(-126, 120, (1000, 1))).astype(np.float32)
    values = rng.choice([1, 100, 1000], (1000, 1)) * rng.standard_normal((1000, 256))
    ties = np.arange(-128, 128)[None, :] + rng.choice([-1e-7, 0, 0, 1e-7], (1000, 256)) + 0.5
    with np.errstate(over="ignore"):
        x = np.where(rng.integers(0, 2, (1000, 1)), values, ties).astype(np.float32) * scale
    x[:, :4] = [0, -0.0, np.inf, -np.inf]
    got = Divisor.of(jnp.asarray(scale), dtype, None).quantise(jnp.asarray(x), jnp.dtype(dtype), None)
    assert_same_bits(got, quantise.quantise(jnp.asarray(x), jnp.asarray(scale), dtype))


# --- dispatch


def call(
    dtype: Any = jnp.bfloat16,
    scales: Any = None,
    page_size: int = 64,
    head_dim: int = 128,
    lanes: int | None = None,
    **more: Any,
) -> Any:
    """Return the shapes of a call. With `lanes`, the cache is fused, with this number of columns for a key."""
    spec = kv_cache_spec(
        num_pages=more.pop("num_pages", 100),
        page_size=page_size,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        dtype=dtype,
        scales=scales,
    )
    x = jax.ShapeDtypeStruct((64, HEADS, head_dim), jnp.bfloat16)
    kv = PagedKV(**spec.arrays)  # pyrefly: ignore[bad-argument-type]
    if lanes is not None:
        fused = jax.ShapeDtypeStruct((*kv.k.shape[:3], 2 * lanes), kv.k.dtype)
        kv = dataclasses.replace(kv, k=fused, v=None)  # pyrefly: ignore[bad-argument-type]
    return {"kv": kv, "k": x, "v": x, "slots": jax.ShapeDtypeStruct((64,), jnp.int32), **more}


def angles(half: int) -> Rope:
    each = jax.ShapeDtypeStruct((64, half), jnp.float32)
    return Rope(each, each)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("scales", ["head", "channel", 64, 4])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_default_on_hopper(dtype: Any, scales: Any) -> None:
    assert explain("write_kv", **call(dtype, scales)).chosen == "mosaic"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("dtype", "scales"), [(jnp.bfloat16, None), (jnp.int8, "channel"), (jnp.float8_e4m3fn, 4)])
def test_default_over_fused_caches(dtype: Any, scales: Any) -> None:
    assert explain("write_kv", **call(dtype, scales, lanes=128)).chosen == "mosaic"


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("rotation", [None, "neox", "interleaved"])
def test_accesses_to_fused_caches_are_aligned(rotation: Any) -> None:
    """A thread accesses a whole vector, so rows and values must start at a multiple of a vector."""
    rope = None if rotation is None else dataclasses.replace(angles(32), style=rotation)

    def static(num_tokens: int, lanes: int | None) -> WriteKVStatic:
        slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
        return WriteKVStatic.of(WriteKVCall(**call(lanes=lanes, slots=slots), rope=rope, q=None))

    for lanes, num_tokens in itertools.product((128, 130, 132, 136, 192), (64, 4096)):
        fused = static(num_tokens, lanes)
        assert fused.value_column == lanes
        assert lanes % fused.tile.layout.vector == 0
        if lanes % 8 == 0:
            assert fused.tile == static(num_tokens, None).tile


@pytest.mark.parametrize("rotation", ["none", "neox", "interleaved"])
def test_threads_divide_segments_evenly(rotation: Any) -> None:
    """A segment is a range of columns that is rotated as a whole or not rotated. For all keys, each thread of a row
    must have the same number of adjacent columns of a segment.
    """
    for head_dim, half, entries, group in itertools.product(range(8, 264, 8), (1, 4, 24), (1, 4096, 2**17), (0, 1, 4)):
        half = 0 if rotation == "none" else min(half, head_dim // 2)
        key = WriteKVKey(head_dim, half, rotation, entries, group)
        threads, vector = key.threads_and_vector(mosaic_config(key))
        segments = {head_dim - 2 * half, half if rotation == "neox" else 2 * half}
        assert all(segment % (threads * vector) == 0 for segment in segments)
        assert 1 <= threads <= 32
        assert vector % (2 if rotation == "interleaved" else 1) == 0


@pytest.mark.parametrize(("row_threads", "scan_tokens"), [(3, 1), (64, 1), (8, 0), (8, 17)])
def test_invalid_configuration_raises(row_threads: int, scan_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        WriteKVConfig(row_threads, scan_tokens)


UNSUPPORTED = {
    "a page's tokens in one group": (
        call(jnp.int8, 1, page_size=128),
        "takes up to 64 values per thread, got 128: 128 tokens of 128 columns in segments of 128",
    ),
    "a page's tokens in one group of a fused cache with narrow accesses": (
        call(jnp.int8, 1, lanes=130, implementation="mosaic"),
        "takes up to 32 values per thread, got 64: 64 tokens of 128 columns in segments of 128, 2 columns at a time",
    ),
    "a single pair": (call(rope=angles(1)), "two pairs of columns or more that are rotated in neox style, got one"),
    "many of an odd number of columns": (call(head_dim=255, rope=angles(3)), "got 255: 1 tokens of 255 columns"),
    "an odd number of columns in interleaved style": (
        call(head_dim=127, rope=dataclasses.replace(angles(16), style="interleaved")),
        "takes an even number of columns with interleaved rotation.* got 127 columns",
    ),
    "values at an odd column in interleaved style": (
        call(lanes=129, rope=dataclasses.replace(angles(16), style="interleaved"), implementation="mosaic"),
        "takes an even number of columns with interleaved rotation.* and values from column 129 on",
    ),
    "a pool too large": (call(num_pages=2**24), r"takes pools of less than 2\*\*31 rows, got 2147483648"),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("arguments", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls_state_the_reason(arguments: dict[str, Any], reason: str) -> None:
    explanation = explain("write_kv", **arguments)
    assert explanation.chosen != "mosaic"
    assert re.search(reason, explanation.refused["mosaic"])


def test_unsupported_on_a_cpu_without_interpreter() -> None:
    refused = explain("write_kv", **call()).refused
    assert refused["mosaic"] == "needs a GPU of compute capability 9.0 (H100, H200) or 10.0 (B200, GB200), this is cpu"


# --- real sizes, on a GPU

CACHES = [
    ("bfloat16", None),
    ("float16", None),
    *((dtype, scales) for dtype in ("int8", FP8) for scales in ("head", "channel", 64, 4, 1)),
]


def chunks(rng: np.random.Generator, num_tokens: int, num_pages: int, page_size: int) -> Iterator[jax.Array]:
    """Yield the slots of three calls. Two sequences grow by chunks that end at any position in a page."""
    pages = rng.permutation(num_pages).reshape(2, -1)
    position = np.zeros(2, int)
    for _ in range(3):
        counts = rng.multinomial(num_tokens, [0.3, 0.7]) - 1  # the two tokens that are left have slot -1
        slots = [np.full(2, -1)]
        for table, start, count in zip(pages, position, counts, strict=True):
            positions = start + np.arange(count)
            slots.insert(0, table[positions // page_size] * page_size + positions % page_size)
        position += counts
        yield jnp.asarray(np.concatenate(slots), jnp.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [64, 4096])
@pytest.mark.parametrize(("dtype", "scales"), CACHES)
def test_real_sizes_equal_xla_bytes(dtype: str, scales: Any, num_tokens: int) -> None:
    check_bytes(dtype, scales, num_tokens, page_size=64, head_dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [64, 4096])
@pytest.mark.parametrize(("dtype", "scales"), CACHES)
def test_fused_caches_of_real_sizes_equal_xla_bytes(dtype: str, scales: Any, num_tokens: int) -> None:
    check_bytes(dtype, scales, num_tokens, page_size=64, head_dim=128, lanes=136)


def check_bytes(
    dtype: str, scales: Any, num_tokens: int, page_size: int, head_dim: int, lanes: int | None = None
) -> None:
    """Append tokens in several calls, and compare all bytes with the XLA implementation. With `lanes`, the cache is
    fused, with this number of columns for a key.
    """
    rng, num_pages = fresh_rng(), 8 * -(-num_tokens // page_size)
    spec = kv_cache_spec(
        num_pages=num_pages, page_size=page_size, num_kv_heads=8, head_dim=head_dim, dtype=dtype, scales=scales
    )
    allocated = PagedKV.allocate(spec)
    if scales in ("head", "channel"):
        allocated = jax.tree.map(lambda a: a * 0.02 if a.dtype == jnp.float32 else a, allocated)
    if lanes is not None:
        fused = any_bits(rng, (*allocated.k.shape[:3], 2 * lanes), allocated.k.dtype)
        allocated = dataclasses.replace(allocated, k=jnp.asarray(fused), v=None)
    got = want = allocated
    for slots in chunks(rng, num_tokens, num_pages, page_size):
        sizes = np.exp(rng.standard_normal((2, num_tokens, 8, 1)))
        k, v = jnp.asarray(sizes * rng.standard_normal((2, num_tokens, 8, head_dim)), jnp.bfloat16)
        want = write(XLA, want, k, v, slots)
        got = write(KERNEL, got, k, v, slots)
        assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [64, 4096])
@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize(("half", "norm_order"), [(64, "before_rope"), (32, "after_rope")])
def test_real_sizes_with_norm_and_rotation(style: Any, half: int, norm_order: Any, num_tokens: int) -> None:
    check_rotated(style, half, norm_order, num_tokens, page_size=64)


def check_rotated(style: Any, half: int, norm_order: Any, num_tokens: int, page_size: int) -> None:
    """Compare rotated keys and queries with the XLA implementation. They may differ by one unit in the last place of
    bfloat16.
    """
    rng, num_pages = fresh_rng(), 8 * -(-num_tokens // page_size)
    angle = rng.uniform(0, 7, (num_tokens, half))
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    norms = jnp.asarray(1 + 0.3 * rng.standard_normal((2, 128)), jnp.bfloat16)
    rope = Rope(cos, sin, *norms, style=style, norm_order=norm_order)
    spec = kv_cache_spec(num_pages=num_pages, page_size=page_size, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    x = jnp.asarray(rng.standard_normal((num_tokens, 48, 128)), jnp.bfloat16)
    slots = next(chunks(rng, num_tokens, num_pages, page_size))
    call = PagedKV.allocate(spec), x[:, :8], x[:, 8:16], slots
    got, want = (write(variant, *call, rope=rope, q=x[:, 16:]) for variant in (KERNEL, XLA))
    assert_same_bits(got[0].v, want[0].v)
    for a, b in ((got[0].k, want[0].k), (got[1], want[1])):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2.0**-7, atol=1e-5)
