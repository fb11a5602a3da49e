"""Helpers of the contract suites: random inputs, poisoned pages, comparisons, and inspection of compiled calls.

A suite runs every implementation of its operation, with the settings and tolerances in `VARIANTS`.
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
"""Block table entry of a page without visible tokens. As a page id, it is outside every pool."""


# --- plans


def plan_for(arguments: Mapping[str, Any], **options: Any) -> DecodePlan:
    """Return a plan for a decode call with these arguments. `options` are passed to `plan_decode`."""
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
    """Error bounds: |got - want| <= absolute + relative · |want| per element, and 1 - cosine <= `cosine` over all
    elements.
    """

    absolute: float
    relative: float
    cosine: float


F32_OUT = Tolerance(1e-5, 1e-5, 1e-9)
F32_LSE = Tolerance(1e-5, 1e-5, 1e-9)
HALF_OUT = Tolerance(8e-4, 2 / 128, 5e-6)
HALF_LSE = Tolerance(1e-5, 8 / 65536, 5e-6)
BF16_ROUNDOFF = 2**-9
"""Maximum relative error of rounding to bfloat16."""
ROUNDED_TWICE = 0.5 * (2 * BF16_ROUNDOFF) ** 2 / (1 - 2 * BF16_ROUNDOFF)
"""Maximum of 1 - cosine if all elements have the same two bfloat16 rounding errors, of a weight and of the output.

`HALF_OUT` assumes independent rounding errors. They are equal if the largest outputs come from a single key, because
the weight of a key is rounded once for all columns.
"""
HALF_SCALE = 0.125
"""Standard deviation of the values (V, or latents) of 16-bit inputs.

The error of a weight rounded to bfloat16 is up to 2**-9 of the value that it multiplies, even if the output is small.
The absolute tolerance is from FlashMLA, and its tests use a deviation of 0.1. With 0.25, queries that see few keys
sometimes exceed the tolerance.
"""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Implementation, its settings in the contract suites, and its tolerances.

    Attributes:
      implementation: name of the implementation.
      config: replacement of the tuned or heuristic configuration, or a tuple of replacements of different types.
      architecture: GPU architecture of the traced kernels. Variants with different architectures share no compilation.
      honours_plans: whether a sequence has bit-identical results in any batch and order with a plan in `fixed` mode.
      tolerances: tolerances of output and LSE, by whether inputs are float32.
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
        """Context in which operations are traced with the configuration of this variant."""
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
    # Small inputs have several tiles of this size, and 3 does not divide the number of rows.
    "xla": Variant("xla", XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4)),
}
"""Settings for small inputs of every implementation that an operation may list."""


def variants(implementations: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test: `variant` is each of the implementations of an operation."""
    return pytest.mark.parametrize("variant", [pytest.param(VARIANTS[name], id=name) for name in implementations])


def compiled(op: Callable[..., Any], variant: Variant, **static: Any) -> Jitted:
    """Return the jitted `op`, which takes arrays by keyword.

    Calls with the same variant and static arguments return the same function, so cases of equal shapes compile once.
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
    """Return a generator with a random seed. pytest prints the seed of a failed test; `TEST_SEED=... pytest ...` uses
    it.
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
    """Draw block tables for visible tokens.

    Entries with a visible token get random pages other than page 0 (head-wise: random page rows). About a quarter of
    the entries share a page with another entry. All other entries are garbage, or PAGE_NONE if `absent`.

    Args:
      visible: bool [B, Hkv, K], whether at least one query sees the token.
      absent: bool [B, Hkv or 1, K / page_size], entries that must be PAGE_NONE.

    Returns:
      int32 [B, P], or [B, Hkv, P] if head-wise.
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
    """Return the mask of cache slots without a visible token of any sequence, bool [N, Hkv, page_size]."""
    num_kv_heads = visible.shape[1]
    dead = np.ones((num_pages * num_kv_heads, page_size), bool)
    for b, h, t in np.argwhere(visible):
        entry = t // page_size
        row = tables[b, h, entry] if tables.ndim == 3 else tables[b, entry] * num_kv_heads + h
        dead[row, t % page_size] = False
    return dead.reshape(num_pages, num_kv_heads, page_size)


def poison(rng: np.random.Generator, values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Return a copy with NaN and infinities (int8: random values) where `dead`, a mask of the leading axes, is true."""
    dtype = values.dtype
    if dtype == np.int8:
        worst = rng.integers(-128, 128, values.shape).astype(dtype)
    elif dtype == ml_dtypes.float8_e4m3fn:  # this dtype has no infinity
        worst = np.full(values.shape, np.nan, dtype)
    else:
        worst = rng.choice(np.array([np.nan, np.nan, np.inf, -np.inf], dtype), values.shape)
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), worst, values)


def zero(values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Return a copy with zeros where `dead`, a mask of the leading axes, is true."""
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), np.zeros((), values.dtype), values)


# --- comparison


def assert_close(name: str, got: Any, want: Any, tolerance: Tolerance) -> None:
    """Check that finite values are within the tolerance, infinities are equal, and no value is NaN."""
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
    """Check output and LSE against tolerances, and that the output of rows without visible keys is exactly 0."""
    assert_close("output", got[0], want[0], tolerances[0])
    assert_close("LSE", got[1], want[1], tolerances[1])
    empty = np.asarray(got[0])[np.asarray(want[1]) == -np.inf]
    assert not np.count_nonzero(empty), "output of a row without visible keys is not 0"


def assert_empty(result: tuple[Any, Any], empty: np.ndarray) -> None:
    """Check that output and LSE are 0 and -inf in `empty` rows, and that the LSE of every other row is not -inf."""
    assert empty.any()
    assert not empty.all()
    out, lse = map(np.asarray, result)
    assert not np.count_nonzero(out[empty])
    np.testing.assert_array_equal(np.isneginf(lse), empty)


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw values with random bit patterns, including NaNs with payloads, infinities, -0.0 and subnormals.

    `make test` compiles with XLA's old CPU emitters. They convert bfloat16 to float32 and back, which changes NaN
    payloads and, in threads of XLA's pool, flushes subnormals to zero. With these emitters, the drawn 16-bit values
    have only the default NaN and no subnormals.
    """
    bits = np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()
    if np.dtype(dtype).itemsize == 2 and "xla_cpu_disable_new_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        bits[np.isnan(bits)] = np.nan
        bits[np.abs(bits) < ml_dtypes.finfo(dtype).smallest_normal] = 0
    return bits


def assert_same_bits(got: Any, want: Any) -> None:
    """Check that two pytrees of arrays are equal bit for bit, NaN payloads included."""
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
    *(
        "scatter",
        "dynamic-update-slice",
        "fusion",
    ),  # other arrays of a fusion are in its body, or temporary memory
}
"""Instructions whose result may alias an operand."""


def temp_bytes(call: Jitted, /, *args: Any, **kwargs: Any) -> int:
    """Return the temporary memory of a jitted call [bytes], without arguments and results. Arguments may be shapes."""
    analysis = call.lower(*args, **kwargs).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def assert_stays_put(call: Jitted, pages: Any, /, *args: Any, **kwargs: Any) -> None:
    """Check that a compiled call does not copy the cache.

    The check fails if an instruction that cannot alias an operand has a result as large as `pages`, or if the call uses
    `pages.nbytes` or more of temporary memory. All other arrays of the call must be smaller than `pages`.

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
    """Check that the lowered call has no host callback or transfer."""
    text = str(call.lower(*args, **kwargs).as_text())
    for word in ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost"):
        assert word not in text, f"the lowered call contains {word!r}"


def scope_names(call: Jitted, /, *args: Any, **kwargs: Any) -> str:
    """Return the text of the lowered call with its name stacks, which contain the named scopes."""
    return str(call.lower(*args, **kwargs).as_text(debug_info=True))


def exported(call: Jitted, arrays: Mapping[str, Any]) -> Callable[..., Any]:
    """Serialise a call with `jax.export`, and return the deserialised call."""
    serialised = export.export(call)(**arrays).serialize()
    return export.deserialize(serialised).call


@contextlib.contextmanager
def interpreting(capsys: pytest.CaptureFixture[str], **params: Any) -> Iterator[None]:
    """Context in which Mosaic kernels run in the interpreter. A race is an error; jax 0.11 only prints it."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **params)):
        yield
    printed = capsys.readouterr().out
    print(printed)
    assert "RACE DETECTED" not in printed


@contextlib.contextmanager
def keys_cut(multiprocessors: int = 64) -> Iterator[list[KvSplits]]:
    """Context in which kernels of `mosaic.hopper.prefill` split keys among CTAs even if this is not faster.

    Args:
      multiprocessors: number of multiprocessors that the kernels are traced for.

    Yields:
      A list to which each traced call appends its `KvSplits`. A call that was traced before is not traced again.
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
    """Context that yields a list of the page tiles that portable implementations load: (page rows, tile number).

    Only calls traced in this context are recorded.
    """
    tiles: list[tuple[list[int], int]] = []
    locate = PageTiles.locate

    def recording(self: PageTiles, rows: jax.Array, j: jax.Array) -> Any:
        jax.debug.callback(lambda rows, j: tiles.append((rows.tolist(), int(j))), rows, j)
        return locate(self, rows, j)

    with mock.patch.object(PageTiles, "locate", recording):
        yield tiles
        jax.effects_barrier()
