"""Tests of invalid arguments of `paged_decode` and `paged_prefill`: the error names the argument.

All arguments are shapes without values, so a test also fails if the operation computes something before it raises.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import DecodePlan, HeadWindow, PagedKV, PagedLatent, PlanKey, paged_decode, paged_prefill
from pallas_attn.runtime import dispatch

B, Q, T, HQ, HKV, D, N, PS, P = 3, 2, 7, 4, 2, 16, 9, 8, 5

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def of(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> Any:
    return of(*shape, dtype=jnp.int32)


def cache(dtype: Any = jnp.float32, scale: Any = None) -> PagedKV:
    return PagedKV(of(N, HKV, PS, D, dtype=dtype), of(N, HKV, PS, D, dtype=dtype), scale, scale)


def plan(batch: int = B, page_size: int = PS, window: Any = None, q_lens: bool = False) -> DecodePlan:
    """Return the shapes of a plan for the call `DECODE`, or for a call that differs in the given values."""
    rows, of_programs = batch * HKV, ints(5)
    made_for = PlanKey("paged_decode", batch, Q, HQ, HKV, page_size, P, window, q_lens)
    return DecodePlan(*(ints(rows),) * 5, *(ints(rows + 1),) * 2, *(of_programs,) * 3, made_for, "xla", 0)


KV = cache()
INT8 = cache(jnp.int8, of(HKV))
SHARED = {"kv": KV, "block_tables": ints(B, P), "kv_lens": ints(B)}
DECODE = {"q": of(B, Q, HQ, D), **SHARED}
PREFILL = {"q": of(T, HQ, D), "cu_q_lens": ints(B + 1), **SHARED}


# (name of the mistake, changed arguments, pattern of the error message)
BOTH: list[tuple[str, dict[str, Any], str]] = [
    ("cache rank", {"kv": PagedKV(of(N, PS, D), KV.v)}, r"kv.k: expected shape \[N, Hkv, ps, D=16\], got \[9, 8, 16\]"),
    ("cache width", {"kv": PagedKV(of(N, HKV, PS, 8), KV.v)}, r"kv.k: expected shape .*D=16\], got \[9, 2, 8, 8\]"),
    ("cache dtype", {"kv": cache(jnp.int16)}, "kv.k: expected dtype .*int8.*, got int16"),
    ("v unlike k", {"kv": replace(KV, v=of(N, HKV, 4, D))}, r"kv.v: expected shape \[N=9, Hkv=2, ps=8, Dv\]"),
    (
        "odd fused columns",
        {"kv": PagedKV(of(N, HKV, PS, 2 * D + 1))},
        r"kv.k: expected 2·W columns with W >= D=.*; got 33 columns",
    ),
    ("few fused columns", {"kv": PagedKV(of(N, HKV, PS, 2 * D - 2))}, "kv.k: expected .* W >= D=16, .* got 30"),
    ("v dtype", {"kv": replace(KV, v=of(N, HKV, PS, D, dtype=jnp.int16))}, "kv.v: expected dtype .*, got int16"),
    ("head ratio", {"kv": PagedKV(*[of(N, 3, PS, D)] * 2)}, "q: its 4 heads must be a multiple of the 3 KV heads"),
    ("more KV heads", {"kv": PagedKV(*[of(N, 8, PS, D)] * 2)}, "q: its 4 heads must be a multiple of the 8 KV heads"),
    ("no k_scale", {"kv": replace(INT8, k_scale=None)}, "kv.k_scale: a int8 cache needs scales, got None"),
    ("no v_scale", {"kv": replace(INT8, v_scale=None)}, "kv.v_scale: a int8 cache needs scales, got None"),
    ("scales of floats", {"kv": cache(scale=of(HKV))}, r"kv.k_scale: a float32 cache has no scales, got .*\[2\]"),
    ("scale dtype", {"kv": cache(jnp.int8, of(HKV, dtype=jnp.bfloat16))}, "kv.k_scale: expected dtype float32"),
    ("scale heads", {"kv": cache(jnp.int8, of(3))}, r"kv.k_scale: expected shape \[Hkv=2\], .*got \[3\]"),
    ("scale groups", {"kv": cache(jnp.int8, of(N, HKV, 3))}, "kv.k_scale: .*g dividing ps=8, got .9, 2, 3."),
    ("scale pages", {"kv": cache(jnp.int8, of(N + 1, HKV, 4))}, r"kv.k_scale: .*N=9, .*got \[10, 2, 4\]"),
    ("no scale groups", {"kv": cache(jnp.int8, of(N, HKV, 0))}, r"kv.k_scale: .*got \[9, 2, 0\]"),
    ("scale layouts", {"kv": replace(INT8, v_scale=of(HKV, D))}, "kv.v_scale: expected the layout of kv.k_scale"),
    ("table rank", {"block_tables": ints(B)}, "block_tables: expected shape"),
    ("table rank 4", {"block_tables": ints(B, HKV, P, 1)}, "block_tables: expected shape"),
    ("table batch", {"block_tables": ints(B + 1, P)}, "(block_tables|cu_q_lens): expected shape"),
    ("table heads", {"block_tables": ints(B, HQ, P)}, r"block_tables: expected shape .*Hkv=2, P\], got \[3, 4, 5\]"),
    ("table dtype", {"block_tables": of(B, P, dtype=jnp.uint32)}, "block_tables: expected dtype int32, got uint32"),
    ("no table", {"block_tables": ints(B, 0)}, "block_tables: expected P of at least 1"),
    ("lengths", {"kv_lens": ints(B - 1)}, r"kv_lens: expected shape \[.=3\], got \[2\]"),
    ("lengths dtype", {"kv_lens": of(B)}, "kv_lens: expected dtype int32, got float32"),
    ("window 0", {"window": 0}, "window: expected an int from 1 .*, got 0"),
    ("negative window", {"window": -1}, "window: expected an int from 1 .*, got -1"),
    ("window too large", {"window": 2**31}, "window: expected an int from 1 to 2"),
    ("float window", {"window": 3.0}, "window: expected None, an int of at least 1 or a HeadWindow, got 3.0"),
    ("bool window", {"window": True}, "window: expected None, an int of at least 1 or a HeadWindow, got True"),
    ("window of query heads", {"window": HeadWindow(ints(HQ), ints(HKV))}, r"window.window: expected shape \[Hkv=2\]"),
    ("window dtype", {"window": HeadWindow(of(HKV), ints(HKV))}, "window.window: expected dtype int32, got float32"),
    (
        "sink tokens",
        {"window": HeadWindow(ints(HKV), ints(1))},
        r"window.sink_tokens: expected .*\[1\]",
    ),
    ("sinks of KV heads", {"sinks": of(HKV)}, r"sinks: expected shape \[Hq=4\], got \[2\]"),
    ("sinks dtype", {"sinks": of(HQ, dtype=jnp.bfloat16)}, "sinks: expected dtype float32, got bfloat16"),
    ("scale 0", {"sm_scale": 0.0}, "sm_scale: expected a positive finite number, or None, got 0.0"),
    ("scale NaN", {"sm_scale": float("nan")}, "sm_scale: expected a positive finite number, or None, got nan"),
    ("scale inf", {"sm_scale": float("inf")}, "sm_scale: expected a positive finite number, or None, got inf"),
    ("scale of an array", {"sm_scale": jnp.ones(2)}, r"sm_scale: expected a positive .*, got ArrayImpl of shape \[2\]"),
    ("scale of a bool", {"sm_scale": True}, "sm_scale: expected a positive finite number, or None, got True"),
    ("scale no float holds", {"sm_scale": 10**400}, "sm_scale: expected a positive finite number, or None, got 1000"),
    ("scale of a string", {"sm_scale": "0.1"}, "sm_scale: expected a positive finite number, or None, got '0.1'"),
    ("no cap", {"soft_cap": 0}, "soft_cap: expected a positive finite number, or None, got 0"),
    ("no cache", {"kv": None}, "kv: expected a PagedKV, got None"),
    ("another cache", {"kv": PagedLatent(of(N, PS, D))}, "kv: expected a PagedKV, got PagedLatent"),
    ("one scale of all", {"kv": cache(jnp.int8, of())}, r"kv.k_scale: .*one scale of all heads is jnp.full.*got \[\]"),
    ("a float scale", {"kv": cache(jnp.int8, 0.1)}, "kv.k_scale: expected an array, got 0.1"),
    ("queries in a list", {"q": [[1.0]]}, "q: expected an array, got list"),
    ("no lengths", {"kv_lens": None}, "kv_lens: expected an array, got None"),
    ("lengths in a ragged list", {"kv_lens": [[1], [1, 2]]}, "kv_lens: expected integers of one shape"),
    ("float lengths in a list", {"kv_lens": [1.0, 2.0, 3.0]}, "kv_lens: expected dtype int32, got float64"),
    ("large lengths", {"kv_lens": np.array([1, 2, 2**31])}, "kv_lens: expected .* range of int32, got 1 to"),
    ("unknown out dtype", {"out_dtype": "half precision"}, "out_dtype: expected .*, got 'half precision'"),
    ("implementation 3", {"implementation": 3}, "implementation: expected None or names among .*, got 3"),
    ("cap", {"soft_cap": -2.0}, "soft_cap: expected a positive finite number, or None, got -2.0"),
    ("out dtype", {"out_dtype": jnp.int32}, "out_dtype: expected bfloat16 or float16 or float32, got int32"),
    ("fp8 output", {"out_dtype": "float8_e4m3fn"}, "out_dtype: expected .*, got float8_e4m3fn"),
    ("implementation", {"implementation": "cuda"}, "implementation: expected None or names among .*, got 'cuda'"),
    ("no implementation", {"implementation": ()}, "implementation: expected None or names among"),
]
Q8: dict[str, Any] = {"kv": cache(jnp.float8_e4m3fn, of(HKV)), "q_scale": of(HQ)}
ONLY_DECODE: list[tuple[str, dict[str, Any], str]] = [
    ("no scale of 8-bit v", {"kv": replace(KV, v=INT8.v)}, "kv.v_scale: a int8 cache needs scales, got None"),
    ("a scale of 32-bit v", {"kv": replace(INT8, v=KV.v)}, r"kv.v_scale: a float32 cache has no scales, got .*\[2\]"),
    ("a scale of KV heads", Q8 | {"q_scale": of(HKV)}, r"q_scale: expected shape \[Hq=4\], got \[2\]"),
    ("a scale of tokens", Q8 | {"q_scale": of(B, Q)}, r"q_scale: expected shape \[B=3, Q=2, Hq=4\], got \[3, 2\]"),
    ("a negative q_scale", Q8 | {"q_scale": -0.5}, "q_scale: expected a positive finite number, got -0.5"),
    ("16-bit q_scale", Q8 | {"q_scale": of(HQ, dtype=jnp.bfloat16)}, "q_scale: expected dtype float32, got bfloat16"),
    ("8-bit queries", {"q": of(B, Q, HQ, D, dtype=jnp.float8_e4m3fn)}, "q: expected dtype .*, got float8_e4m3fn"),
    (
        "no out dtype of 8-bit queries",
        Q8 | {"q": of(B, Q, HQ, D, dtype=jnp.float8_e4m3fn)},
        "out_dtype: expected a dtype of 16 or 32 bits with queries in float8_e4m3fn, got None",
    ),
    (
        "room for fewer tokens",
        {"out": of(B * Q - 1, HQ, D)},
        r"out: expected at least the 6 tokens of q, \[3, 2, 4, 16\]; got \[5, 4, 16\]",
    ),
    ("out of another dtype", {"out": of(B * Q, HQ, D, dtype=jnp.int32)}, "out: expected dtype float32, got int32"),
    ("q rank", {"q": of(B, HQ, D)}, r"q: expected shape \[B, Q, Hq, D\], got \[3, 4, 16\]"),
    ("q dtype", {"q": of(B, Q, HQ, D, dtype=jnp.int8)}, "q: expected dtype bfloat16 or float16 or float32, got int8"),
    ("a plan of another class", {"plan": 3}, "plan: expected a DecodePlan, got 3"),
    ("batches", {"q": of(B + 1, Q, HQ, D)}, r"block_tables: expected shape \[B=4, P\], got \[3, 5\]"),
    ("q_lens", {"q_lens": ints(B, Q)}, r"q_lens: expected shape \[B=3\], got \[3, 2\]"),
    ("q_lens dtype", {"q_lens": of(B)}, "q_lens: expected dtype int32, got float32"),
    ("mask rank", {"draft_mask": of(Q, Q, dtype=bool)}, r"draft_mask: expected shape \[B=3, Q=2, Q=2\], got \[2, 2\]"),
    ("mask width", {"draft_mask": of(B, Q, 3, dtype=bool)}, r"draft_mask: expected shape .* got \[3, 2, 3\]"),
    ("mask dtype", {"draft_mask": ints(B, Q, Q)}, "draft_mask: expected dtype bool, got int32"),
    ("plan rows", {"plan": plan(batch=2)}, "plan: was made for batch = 2, this call has batch = 3"),
    ("plan pages", {"plan": plan(page_size=16)}, "plan: was made for page_size = 16, this call has page_size = 8"),
]
ONLY_PREFILL: list[tuple[str, dict[str, Any], str]] = [
    ("v of another dtype", {"kv": replace(KV, v=of(N, HKV, PS, D, dtype=jnp.bfloat16))}, "kv.v: expected dtype"),
    ("q rank", {"q": of(B, Q, HQ, D)}, r"q: expected shape \[T, Hq, D\], got \[3, 2, 4, 16\]"),
    ("q dtype", {"q": of(T, HQ, D, dtype=jnp.float8_e4m3fn)}, "q: expected dtype bfloat16 or float16 or float32"),
    ("prefix sums", {"cu_q_lens": ints(B)}, r"cu_q_lens: expected shape \[S\+1=4\], got \[3\]"),
    ("prefix sums' rank", {"cu_q_lens": ints(B + 1, 1)}, "cu_q_lens: expected shape"),
    ("prefix sums' dtype", {"cu_q_lens": of(B + 1)}, "cu_q_lens: expected dtype int32, got float32"),
    ("an array for causal", {"causal": jnp.bool_(False)}, r"causal: expected True or False, known while tracing, got"),
    ("mask of sequences", {"draft_mask": of(B, Q, dtype=bool)}, r"draft_mask: expected shape \[T=7, M\], got \[3, 2\]"),
    ("mask dtype", {"draft_mask": ints(T, Q)}, "draft_mask: expected dtype bool, got int32"),
    (
        "a mask without causality",
        {"causal": False, "draft_mask": of(T, Q, dtype=bool)},
        "draft_mask: expected None with",
    ),
    ("no causality", {"causal": False, "window": 5}, "window: expected None with causal=False, .* got 5"),
    (
        "no causality of heads",
        {"causal": False, "window": HeadWindow(ints(HKV), ints(HKV))},
        "window: expected None with causal=False, .* got HeadWindow",
    ),
]


def rows(op: Callable[..., Any], call: dict[str, Any], table: list[tuple[str, dict[str, Any], str]]) -> list[Any]:
    return [pytest.param(op, call, changes, message, id=f"{op.__name__}, {what}") for what, changes, message in table]


@pytest.mark.parametrize(
    ("op", "call", "changes", "message"),
    rows(paged_decode, DECODE, BOTH + ONLY_DECODE) + rows(paged_prefill, PREFILL, BOTH + ONLY_PREFILL),
)
def test_bad_argument_is_named(
    op: Callable[..., Any], call: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        op(**call | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_scale": of(B, Q, HQ, 1)}, r"q_scale: takes a scale for each head .*blocks of columns.*got \[3, 2, 4, 1\]"),
        ({"kv": INT8}, "q_scale: takes a cache in float8_e4m3fn or float8_e5m2, .*; got a cache in int8"),
        ({"kv": KV}, "q_scale: takes a cache in float8_e4m3fn or float8_e5m2, .*; got a cache in float32"),
    ],
    ids=["blocks", "int8", "float32"],
)
def test_unsupported_8_bit_queries(changes: dict[str, Any], message: str) -> None:
    op: Callable[..., Any] = paged_decode
    with pytest.raises(NotImplementedError, match=message):
        op(**DECODE | Q8 | changes)


@pytest.mark.parametrize(("op", "call"), [(paged_decode, DECODE), (paged_prefill, PREFILL)])
def test_missing_implementation_raises(
    monkeypatch: pytest.MonkeyPatch, op: Callable[..., Any], call: dict[str, Any]
) -> None:
    monkeypatch.setitem(dispatch.MODULES, op.__name__, {("xla", None): "xla"})
    with pytest.raises(NotImplementedError, match=f"{op.__name__} has no 'triton' implementation; it has xla"):
        op(**call, implementation="triton")


@pytest.mark.parametrize(("op", "call"), [(paged_decode, DECODE), (paged_prefill, PREFILL)])
@pytest.mark.parametrize(
    "kv",
    [KV, INT8, cache(jnp.float8_e4m3fn, of(HKV, D)), cache(jnp.int8, of(N, HKV, 4))],
    ids=["float32", "int8 per head", "fp8 per channel", "int8 in groups"],
)
def test_unchanged_arguments_are_valid(op: Callable[..., Any], call: dict[str, Any], kv: PagedKV) -> None:
    """The arguments that the tables of mistakes change are valid without a change."""
    optional = {"kv": kv, "window": HeadWindow(ints(HKV), ints(HKV)), "sinks": of(HQ)}
    if op is paged_decode:
        optional |= {
            "q_lens": ints(B),
            "draft_mask": of(B, Q, Q, dtype=bool),
            "plan": plan(window="per head", q_lens=True),
        }
        optional |= {"q_scale": of(B, Q, HQ)} if kv.k.dtype == jnp.float8_e4m3fn else {}
    static = {"sm_scale": 1.0, "soft_cap": 2.0, "out_dtype": jnp.float16, "implementation": ("mosaic", "xla")}
    out = jax.eval_shape(lambda arrays: op(**arrays, **static), call | optional)
    assert (out.shape, out.dtype) == (call["q"].shape, jnp.float16)
