"""Helpers that the contract suites share: fresh inputs, poisoned pages, comparisons, and inspection of compiled calls.

A suite runs every implementation of its operation; `VARIANTS` has their settings and tolerances.
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
"""Block table entry where no token is visible: used as a page, it is far outside any pool."""


# --- plans


def plan_for(arguments: Mapping[str, Any], **options: Any) -> DecodePlan:
    """Plan for the decode call of these arguments; `options` go to `plan_decode`."""
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
    """Bounds of an error: |got - want| <= absolute + relative · |want| for each element, 1 - cosine <= `cosine` over
    all.
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
"""Maximum of 1 - cosine if all elements have the same two roundings to bfloat16: of a weight and of the output.

`HALF_OUT` assumes that roundings are independent. They are not if the largest outputs come from a single key: its
weight is rounded once for all columns.
"""
HALF_SCALE = 0.125
"""Deviation of the values of 16-bit inputs. Weights rounded to bfloat16 err by 2**-9 of the values they weigh, however
small their sum is; the absolute tolerance, FlashMLA's, is for values of this size (its own tests have 0.1). With values
of twice this size, queries that see few keys exceed it now and then.
"""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Implementation with the settings that the suites run it with, and the tolerances it must keep.

    Attributes:
      implementation: its name.
      config: replaces the tuned or heuristic configuration; or several, each of another type.
      architecture: that its kernels are traced for; those for another are compiled apart.
      honours_plans: whether a row has the same bits in any batch and order in `fixed` mode.
      tolerances: of output and LSE; key True for float32 inputs, False for narrower ones.
    """

    implementation: str
    config: Any = None
    architecture: Architecture | None = None
    honours_plans: bool = False
    tolerances: Mapping[bool, tuple[Tolerance, Tolerance]] = dataclasses.field(
        default_factory=lambda: {True: (F32_OUT, F32_LSE), False: (HALF_OUT, HALF_LSE)}, hash=False
    )

    def tolerance(self, dtype: Any) -> tuple[Tolerance, Tolerance]:
        """Tolerances of output and LSE for queries of a dtype."""
        return self.tolerances[np.dtype(dtype) == np.float32]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Context in which operations are traced with this variant's configuration."""
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
    # Tiles so small that small inputs make many of them, groups that do not divide the rows.
    "xla": Variant("xla", XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4)),
}
"""Every implementation name an operation may list, as the suites run it on small inputs."""


def variants(implementations: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test, which takes `variant`, for each implementation of an operation."""
    return pytest.mark.parametrize("variant", [pytest.param(VARIANTS[name], id=name) for name in implementations])


def compiled(op: Callable[..., Any], variant: Variant, **static: Any) -> Jitted:
    """Jit `op` once for each variant and set of static arguments, so that cases of equal shapes share a compilation.
    The result takes arrays by keyword.
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
    """Generator with a new seed, which pytest shows if the test fails; `TEST_SEED=... pytest ...` repeats it."""
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

    Entries with a visible token get pages (head-wise: rows of any head's pages) of a random permutation, never page 0,
    and about one in four shares its page with another entry. All other entries hold garbage, or PAGE_NONE where absent.

    Args:
      visible: bool [B, Hkv, K], whether some query sees the token.
      absent: bool [B, Hkv or 1, K / page_size].

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
    assert wanted <= ids.size, f"{wanted} entries need a page, of {ids.size}"
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
    """Mask of slots of the pool that hold no visible token of any sequence, bool [N, Hkv, ps]."""
    num_kv_heads = visible.shape[1]
    dead = np.ones((num_pages * num_kv_heads, page_size), bool)
    for b, h, t in np.argwhere(visible):
        entry = t // page_size
        row = tables[b, h, entry] if tables.ndim == 3 else tables[b, entry] * num_kv_heads + h
        dead[row, t % page_size] = False
    return dead.reshape(num_pages, num_kv_heads, page_size)


def poison(rng: np.random.Generator, values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Copy values with NaN and infinities (any int8) where `dead`, a mask of their leading axes."""
    dtype = values.dtype
    if dtype == np.int8:
        worst = rng.integers(-128, 128, values.shape).astype(dtype)
    elif dtype == ml_dtypes.float8_e4m3fn:  # which has no infinity
        worst = np.full(values.shape, np.nan, dtype)
    else:
        worst = rng.choice(np.array([np.nan, np.nan, np.inf, -np.inf], dtype), values.shape)
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), worst, values)


def zero(values: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Copy values with zeros where `dead`, a mask of their leading axes."""
    return np.where(dead.reshape(dead.shape + (1,) * (values.ndim - dead.ndim)), np.zeros((), values.dtype), values)


# --- comparison


def assert_close(name: str, got: Any, want: Any, tolerance: Tolerance) -> None:
    """Check finite values against the tolerance, that infinities are in the same places, and that there is no NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, wanted {want.shape}"
    assert not np.isnan(want).any(), f"{name}: the expected value has NaN"
    assert not np.isnan(got).any(), f"{name}: NaN at {np.argwhere(np.isnan(got))[:4].tolist()}"
    infinite = np.isinf(want) | np.isinf(got)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=f"{name}: infinities differ")
    got, want = got[~infinite], want[~infinite]
    excess = np.abs(got - want) - (tolerance.absolute + tolerance.relative * np.abs(want))
    assert not (excess > 0).any(), (
        f"{name}: {int((excess > 0).sum())} of {got.size} differ by up to {np.abs(got - want).max():.3g}, "
        f"{excess.max():.3g} more than allowed; first {got[excess > 0][0]!r}, wanted {want[excess > 0][0]!r}"
    )
    norms = np.sum(got * got + want * want)
    cosine = 2 * np.sum(got * want) / norms if norms else 1.0
    assert 1 - cosine <= tolerance.cosine, f"{name}: 1 - cosine = {1 - cosine:.3g}, allowed {tolerance.cosine}"


def assert_attention_close(
    got: tuple[Any, Any], want: tuple[Any, Any], tolerances: tuple[Tolerance, Tolerance]
) -> None:
    """Check output and LSE against tolerances, and that rows that see nothing are exactly 0."""
    assert_close("output", got[0], want[0], tolerances[0])
    assert_close("LSE", got[1], want[1], tolerances[1])
    empty = np.asarray(got[0])[np.asarray(want[1]) == -np.inf]
    assert not np.count_nonzero(empty), "output of a row that sees nothing is not 0"


def assert_empty(result: tuple[Any, Any], empty: np.ndarray) -> None:
    """Check that output and LSE are 0 and -inf in `empty` rows, and that no other row's LSE is -inf."""
    assert empty.any()
    assert not empty.all()
    out, lse = map(np.asarray, result)
    assert not np.count_nonzero(out[empty])
    np.testing.assert_array_equal(np.isneginf(lse), empty)


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw values of every bit pattern: NaNs with payloads, infinities, -0.0 and subnormals among them.

    XLA's older emitters for CPUs, with which `make test` compiles, move bfloat16 by way of float32, which makes all
    NaNs one and, on threads of XLA's pool, subnormals zero. Under them values of 16 bits have that NaN alone, and no
    subnormals.
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


# --- looks at what is compiled

IN_PLACE = {
    *("parameter", "bitcast", "bitcast-convert", "get-tuple-element", "optimization-barrier", "while", "conditional"),
    *("scatter", "dynamic-update-slice", "fusion"),  # whatever else a fusion computes shows in its body, or as memory
}
"""Instructions whose result may be, or lie in, one of their operands."""


def temp_bytes(call: Jitted, /, *args: Any, **kwargs: Any) -> int:
    """Memory [bytes] that a jitted call needs beside its arguments and results. Arguments may be shapes."""
    analysis = call.lower(*args, **kwargs).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def assert_stays_put(call: Jitted, pages: Any, /, *args: Any, **kwargs: Any) -> None:
    """Check that the compiled call makes no array as large as `pages` (an array of the cache, or its shape) except in
    place.

    Arguments may be shapes. Nothing else in the call may be as large.
    """
    text = str(call.lower(*args, **kwargs).compile().as_text())
    results = re.findall(r"^ *(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", text, re.MULTILINE)
    assert results, "no instruction found in the compiled module"
    for shape, operation in results:
        size = math.prod(int(n) for n in shape.split(","))
        assert size < pages.size or operation in IN_PLACE, f"{operation} of [{shape}]; the cache has {pages.shape}"
    temp, size = temp_bytes(call, *args, **kwargs), pages.size * np.dtype(pages.dtype).itemsize
    assert temp < size, f"{temp} bytes of memory beside the arguments; pages of {size} bytes may be copied there"


def assert_no_host_callbacks(call: Jitted, /, *args: Any, **kwargs: Any) -> None:
    """Check that neither the traced nor the compiled call goes back to the host."""
    text = str(call.lower(*args, **kwargs).as_text())
    for word in ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost"):
        assert word not in text, f"the lowered call has {word!r}"


def scope_names(call: Jitted, /, *args: Any, **kwargs: Any) -> str:
    """Text of the lowered call with its name stack, in which to look for a named scope."""
    return str(call.lower(*args, **kwargs).as_text(debug_info=True))


def exported(call: Jitted, arrays: Mapping[str, Any]) -> Callable[..., Any]:
    """Serialise a call with `jax.export` and load it again."""
    serialised = export.export(call)(**arrays).serialize()
    return export.deserialize(serialised).call


@contextlib.contextmanager
def interpreting(capsys: pytest.CaptureFixture[str], **params: Any) -> Iterator[None]:
    """Context in which Mosaic kernels run interpreted. Fails on a race, which the interpreter of jax 0.11 only
    prints."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **params)):
        yield
    printed = capsys.readouterr().out
    print(printed)
    assert "RACE DETECTED" not in printed


@contextlib.contextmanager
def keys_cut(multiprocessors: int = 64) -> Iterator[list[KvSplits]]:
    """Context in which kernels of `mosaic.hopper.prefill` are traced for so many multiprocessors, as if cutting keys
    cost nothing.

    Yields a list to which each traced call adds how its keys are cut. Calls traced earlier with the same settings are
    missing.
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
    """Context that yields a list of the rows and the number of each page tile that a portable implementation traced
    here loads.
    """
    tiles: list[tuple[list[int], int]] = []
    locate = PageTiles.locate

    def recording(self: PageTiles, rows: jax.Array, j: jax.Array) -> Any:
        jax.debug.callback(lambda rows, j: tiles.append((rows.tolist(), int(j))), rows, j)
        return locate(self, rows, j)

    with mock.patch.object(PageTiles, "locate", recording):
        yield tiles
        jax.effects_barrier()
