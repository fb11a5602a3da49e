"""Helpers for tests of operations: random inputs, poisoned pages, comparisons, and inspection of compiled calls.

Poisoned slots of the cache hold NaN and infinities, so that a result changes if an implementation reads them. A variant
is an implementation of an operation together with its settings and tolerances in the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import PAGE_NONE, DecodePlan, plan_decode
from pallas_attn.mosaic.prefill import split
from pallas_attn.mosaic.prefill.split import KvSplits
from pallas_attn.mosaic.primitives import basics
from pallas_attn.portable.online_softmax import XlaConfig
from pallas_attn.portable.page_tiles import PageTiles
from pallas_attn.runtime.device import Architecture

type Jitted = jax.stages.Wrapped

GARBAGE = 2_147_480_000
"""Invalid page id, larger than any pool. Tests write it to block table entries whose page has no visible token."""


# --- plans


def plan_for(arguments: Mapping[str, Any], **options: Any) -> DecodePlan:
    """Return a plan for `paged_decode` or `mla_decode` with these arguments. `options` are passed to `plan_decode`."""
    names = "q", "q_latent", "q_rope", "kv", "cache", "block_tables", "kv_lens", "q_lens", "window"
    given: dict[str, Any] = {name: arguments[name] for name in names if arguments.get(name) is not None}
    given = {name: x if isinstance(x, int) else jax.tree.map(jnp.asarray, x) for name, x in given.items()}
    if "kv" in given:
        given["cache"] = given.pop("kv")
    else:
        given["q"] = given.pop("q_latent"), given.pop("q_rope")
    return plan_decode(**given, **options)


# --- implementations


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Error bounds of a result: |got - want| <= absolute + relative · |want| for each element, and 1 - c <= `cosine`,
    where c is 2·Σ got·want / Σ (got² + want²) over all elements.
    """

    absolute: float
    relative: float
    cosine: float


F32_OUT = Tolerance(1e-5, 1e-5, 1e-9)
F32_LSE = Tolerance(1e-5, 1e-5, 1e-9)
BF16_ROUNDOFF = 2**-9
"""Maximum absolute error of rounding a number of at most 1 to bfloat16. The maximum relative error is 2**-8."""
HALF_SCALE = 0.125
"""Standard deviation of the values (V, or latents) of 16-bit inputs."""
HALF_OUT = Tolerance(5 * HALF_SCALE * BF16_ROUNDOFF, 2 / 128, 5e-6)
"""Tolerance of outputs in bfloat16 and float16.

A softmax weight is at most 1, so rounding it to bfloat16 changes it by at most 2**-9. The output changes by up to this
times the value that the weight multiplies, even if the output is small. The absolute tolerance is this change for a
value of five standard deviations, which one of 1.7 million normal values exceeds.
"""
HALF_LSE = Tolerance(1e-5, 8 / 65536, 5e-6)
ROUNDED_TWICE = 0.5 * (2 * BF16_ROUNDOFF) ** 2 / (1 - 2 * BF16_ROUNDOFF)
"""1 - cosine if all elements have the same two relative rounding errors of 2**-9, half of the maximum: of the softmax
weight and of the output, both in bfloat16.

`HALF_OUT.cosine` assumes that the errors of different elements are independent. They are equal if an output comes from
a single key, because the weight of a key is rounded once for all columns. Tests of these inputs use this limit.
"""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Implementation of an operation, with its settings and tolerances in the tests.

    Attributes:
      implementation: name of the implementation.
      config: configuration that replaces the tuned or heuristic one, or a tuple of configurations of different types.
      None to replace nothing.
      architecture: GPU architecture for which kernels are traced; None for the default.
      honours_plans: whether, with a plan in `fixed` mode, the result of a sequence has the same bits in any batch.
      tolerances: tolerances of output and LSE. The key is True for float32 inputs and False for 16-bit inputs.
    """

    implementation: str
    config: Any = None
    architecture: Architecture | None = None
    honours_plans: bool = False
    tolerances: Mapping[bool, tuple[Tolerance, Tolerance]] = dataclasses.field(
        default_factory=lambda: {True: (F32_OUT, F32_LSE), False: (HALF_OUT, HALF_LSE)}, hash=False
    )

    def tolerance(self, dtype: Any) -> tuple[Tolerance, Tolerance]:
        """Return the tolerances of output and LSE for queries of a dtype."""
        return self.tolerances[np.dtype(dtype) == np.float32]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Return a context in which operations are traced with `config`."""
        configs = self.config if isinstance(self.config, tuple) else () if self.config is None else (self.config,)
        by_type = {type(config): config for config in configs}
        if not by_type:
            yield
            return

        def lookup(op: str, key: Any, make: Any, heuristic: Callable[[], Any]) -> Any:
            return by_type[make] if make in by_type else heuristic()

        with mock.patch("pallas_attn.runtime.tuning.lookup", lookup):
            yield


VARIANTS = {
    "reference": Variant("reference"),
    # With these small tiles, the small inputs of tests have several tiles. 3 does not divide the number of rows.
    "xla": Variant("xla", XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4)),
}
"""Variants that run on every device, by name of the implementation."""


def variants(implementations: Iterable[str]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test for `variant` in the variants of these implementations."""
    return pytest.mark.parametrize("variant", [pytest.param(VARIANTS[name], id=name) for name in implementations])


def compiled(op: Callable[..., Any], variant: Variant, **static: Any) -> Jitted:
    """Return the jitted operation `op` of a variant, a function of arrays by keyword.

    The function is cached by operation, variant and static arguments, so that tests with equal shapes compile it once.
    """
    return _compiled(op, variant, tuple(sorted(static.items())))


@functools.cache
def _compiled(op: Callable[..., Any], variant: Variant, static: tuple[tuple[str, Any], ...]) -> Jitted:
    @jax.jit
    def call(**arrays: Any) -> Any:
        with variant.settings():
            return op(**arrays, **dict(static), implementation=variant.implementation)

    return call


# --- inputs


def fresh_rng() -> np.random.Generator:
    """Return a generator with a random seed. pytest shows the seed if the test fails. `TEST_SEED=<seed> pytest ...`
    repeats the test with this seed.
    """
    seed = int(os.environ.get("TEST_SEED") or secrets.randbits(32))
    print(f"TEST_SEED={seed}")
    return np.random.default_rng(seed)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw standard normal values, rounded to `dtype`."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def paginate(
    rng: np.random.Generator,
    visible: np.ndarray,
    *,
    page_size: int,
    num_pages: int,
    head_wise: bool = False,
    absent: np.ndarray | None = None,
) -> np.ndarray:
    """Draw block tables for sequences whose visible tokens are given.

    A table entry whose page has a visible token gets a random page id other than 0. About a quarter of these entries
    get a page id that another entry has, too. All other entries get `GARBAGE`, -`GARBAGE`, 0 or PAGE_NONE at random.

    Args:
      visible: bool [B, Hkv, K], whether at least one query of the sequence sees the token.
      head_wise: whether each KV head has its own table, with ids of page rows (page * Hkv + head).
      absent: bool [B, Hkv or 1, K / page_size], entries that are always PAGE_NONE.

    Returns:
      int32 [B, P], or [B, Hkv, P] if head-wise, where P = K / page_size.
    """
    batch, num_kv_heads, tokens = visible.shape
    seen = visible.reshape(batch, num_kv_heads, tokens // page_size, page_size).any(-1)
    per_page = num_kv_heads if head_wise else 1
    if not head_wise:
        seen = seen.any(axis=1, keepdims=True)
    ids = rng.permutation(np.arange(per_page, num_pages * per_page))
    wanted = int(seen.sum())
    assert wanted <= ids.size, f"{wanted} entries need a page, but the pool has {ids.size}"
    ids = ids[:wanted]
    if wanted > 1:
        share = rng.choice(wanted, size=max(1, wanted // 4), replace=False)
        ids[share] = ids[rng.choice(wanted, size=share.size)]
    tables = rng.choice([GARBAGE, GARBAGE, -GARBAGE, 0, PAGE_NONE], size=seen.shape)
    tables[seen] = ids
    if absent is not None:
        absent = np.broadcast_to(absent if head_wise else absent[:, :1], seen.shape)
        assert not (absent & seen).any(), "an absent page cannot hold a visible token"
        tables[absent] = PAGE_NONE
    return (tables if head_wise else tables[:, 0]).astype(np.int32)


def dead_slots(tables: np.ndarray, visible: np.ndarray, *, page_size: int, num_pages: int) -> np.ndarray:
    """Return a mask of the cache slots that no query of any sequence sees, bool [N, Hkv, page_size]."""
    num_kv_heads = visible.shape[1]
    dead = np.ones((num_pages * num_kv_heads, page_size), bool)
    for b, h, t in np.argwhere(visible):
        entry = t // page_size
        row = tables[b, h, entry] if tables.ndim == 3 else tables[b, entry] * num_kv_heads + h
        dead[row, t % page_size] = False
    return dead.reshape(num_pages, num_kv_heads, page_size)


def poison(rng: np.random.Generator, values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Return a copy of `values` with NaN and infinities (int8: random values) where the mask `dead` of the leading axes
    is true.
    """
    dtype = values.dtype
    if dtype == np.int8:
        worst = rng.integers(-128, 128, values.shape).astype(dtype)
    elif dtype == ml_dtypes.float8_e4m3fn:  # float8_e4m3fn has no infinity
        worst = np.full(values.shape, np.nan, dtype)
    else:
        worst = rng.choice(np.array([np.nan, np.nan, np.inf, -np.inf], dtype), values.shape)
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), worst, values)


def zero(values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Return a copy of `values` with zeros where the mask `dead` of the leading axes is true."""
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), np.zeros((), values.dtype), values)


# --- comparison


def assert_close(name: str, got: Any, want: Any, tolerance: Tolerance) -> None:
    """Assert that finite values are within the tolerance, infinities are equal, and no value is NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, expected {want.shape}"
    assert not np.isnan(want).any(), f"{name}: the expected values contain NaN"
    assert not np.isnan(got).any(), f"{name}: NaN at {np.argwhere(np.isnan(got))[:4].tolist()}"
    infinite = np.isinf(want) | np.isinf(got)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name}: infinities differ")
    got, want = got[~infinite], want[~infinite]
    excess = np.abs(got - want) - (tolerance.absolute + tolerance.relative * np.abs(want))
    assert not (excess > 0).any(), (
        f"{name}: {int((excess > 0).sum())} of {got.size} elements differ by up to {np.abs(got - want).max():.3g}, "
        f"{excess.max():.3g} above the tolerance; first: got {got[excess > 0][0]!r}, expected {want[excess > 0][0]!r}"
    )
    norms = np.sum(got * got + want * want)
    cosine = 2 * np.sum(got * want) / norms if norms else 1.0
    assert 1 - cosine <= tolerance.cosine, f"{name}: 1 - cosine = {1 - cosine:.3g}, allowed {tolerance.cosine}"


def assert_attention_close(
    got: tuple[Any, Any], want: tuple[Any, Any], tolerances: tuple[Tolerance, Tolerance]
) -> None:
    """Assert that output and LSE are within their tolerances, and that the output of query rows without visible keys
    (LSE -inf) is exactly 0.
    """
    assert_close("output", got[0], want[0], tolerances[0])
    assert_close("LSE", got[1], want[1], tolerances[1])
    empty = np.asarray(got[0])[np.asarray(want[1]) == -np.inf]
    assert not np.count_nonzero(empty), "output of a row without visible keys is not 0"


def assert_empty(result: tuple[Any, Any], empty: np.ndarray) -> None:
    """Assert that exactly the query rows of the mask `empty` have LSE -inf, and that their output is 0."""
    assert empty.any()
    assert not empty.all()
    out, lse = map(np.asarray, result)
    assert not np.count_nonzero(out[empty])
    np.testing.assert_array_equal(np.isneginf(lse), empty)


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw values with random bit patterns, including NaNs with payloads, infinities, -0.0 and subnormals.

    Tests use them to check that an operation copies bits unchanged. `make test` compiles with XLA's old CPU emitters,
    which convert bfloat16 to float32 and back when they copy. This changes NaN payloads and flushes subnormals to zero
    in some threads. With these emitters, 16-bit values are drawn with only the default NaN and without subnormals.
    """
    bits = np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()
    if np.dtype(dtype).itemsize == 2 and "xla_cpu_disable_new_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        bits[np.isnan(bits)] = np.nan
        bits[np.abs(bits) < ml_dtypes.finfo(dtype).smallest_normal] = 0
    return bits


def assert_same_bits(got: Any, want: Any) -> None:
    """Assert that two pytrees of arrays are equal bit for bit, including NaN payloads."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(_bits(a), _bits(b))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype != bool else array


# --- inspection of compiled calls

IN_PLACE = {
    *("parameter", "bitcast", "bitcast-convert", "get-tuple-element", "optimization-barrier", "while", "conditional"),
    # A fusion that copies the cache is detected too: its body has the copy as an instruction, or the call needs
    # temporary memory for the copy.
    *("scatter", "dynamic-update-slice", "fusion"),
}
"""HLO instructions whose result may use the memory of an operand."""


def temp_bytes(call: Jitted, /, *args: Any, **kwargs: Any) -> int:
    """Return the bytes of temporary memory of a jitted call, without arguments and results. Arguments may be arrays or
    shapes.
    """
    analysis = call.lower(*args, **kwargs).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def assert_stays_put(call: Jitted, pages: Any, /, *args: Any, **kwargs: Any) -> None:
    """Assert that a compiled call does not copy the cache.

    The assertion fails if an instruction that cannot alias an operand has a result as large as `pages`, or if the call
    uses `pages.nbytes` or more of temporary memory. All other arrays of the call must be smaller than `pages`.

    Args:
      pages: an array of the cache, or its shape and dtype.
      args, kwargs: arguments of the call, arrays or shapes.
    """
    text = str(call.lower(*args, **kwargs).compile().as_text())
    results = re.findall(r"^ *(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", text, re.MULTILINE)
    assert results, "found no instructions in the compiled module"
    for shape, operation in results:
        size = math.prod(int(n) for n in shape.split(","))
        assert size < pages.size or operation in IN_PLACE, f"{operation} of [{shape}]; the cache has {pages.shape}"
    temp, size = temp_bytes(call, *args, **kwargs), pages.size * np.dtype(pages.dtype).itemsize
    assert temp < size, f"{temp} bytes of temporary memory can hold a copy of the pages, {size} bytes"


def assert_no_host_callbacks(call: Jitted, /, *args: Any, **kwargs: Any) -> None:
    """Assert that the lowered call has no host callback and no transfer to or from the host."""
    text = str(call.lower(*args, **kwargs).as_text())
    for word in ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost"):
        assert word not in text, f"the lowered call contains {word!r}"


def scope_names(call: Jitted, /, *args: Any, **kwargs: Any) -> str:
    """Return the text of the lowered call with debug information, which contains the names of `jax.named_scope`."""
    return str(call.lower(*args, **kwargs).as_text(debug_info=True))


def exported(call: Jitted, arrays: Mapping[str, Any]) -> Callable[..., Any]:
    """Export a call with `jax.export`, serialise and deserialise it, and return the deserialised call."""
    serialised = export.export(call)(**arrays).serialize()
    return export.deserialize(serialised).call


@contextlib.contextmanager
def interpreting(capsys: pytest.CaptureFixture[str], **params: Any) -> Iterator[None]:
    """Return a context in which Mosaic kernels run in jax's interpreter with race detection. A race is an error. (jax
    0.11 only prints it, so the context checks the printed text.)
    """
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **params)):
        yield
    printed = capsys.readouterr().out
    print(printed)
    assert "RACE DETECTED" not in printed


@contextlib.contextmanager
def keys_cut(multiprocessors: int = 64) -> Iterator[list[KvSplits]]:
    """Return a context in which the Hopper prefill kernel splits the keys of a sequence among CTAs, even if this is
    slower.

    Args:
      multiprocessors: number of multiprocessors that the kernels are traced for.

    Yields:
      A list to which each traced call appends its `KvSplits`. Calls that were traced before the context append nothing.
    """
    cut: list[KvSplits] = []
    choose = KvSplits.of

    def recording(*args: Any, **kwargs: Any) -> KvSplits:
        cut.append(choose(*args, **kwargs | {"rows": 0}))
        return cut[-1]

    with (
        mock.patch.multiple(split, WORK_TILE_OVERHEAD=0, MERGE_OVERHEAD=0),
        mock.patch.object(basics, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(KvSplits, "of", recording),
    ):
        yield cut


@contextlib.contextmanager
def recorded_tiles() -> Iterator[list[tuple[list[int], int]]]:
    """Return a context that records the page tiles that the portable implementations load.

    It yields a list of (page rows, index of the tile in the sequence). Only calls that are traced in the context are
    recorded.
    """
    tiles: list[tuple[list[int], int]] = []
    locate = PageTiles.locate

    def recording(self: PageTiles, rows: jax.Array, j: jax.Array) -> Any:
        jax.debug.callback(lambda rows, j: tiles.append((rows.tolist(), int(j))), rows, j)
        return locate(self, rows, j)

    with mock.patch.object(PageTiles, "locate", recording):
        yield tiles
        jax.effects_barrier()
