"""torch's attention as a baseline, over contiguous keys and values.

torch has no paged kernel. The baseline is its attention over contiguous keys and values of the same number of tokens.
It views the memory of our page pool as contiguous arrays, so it needs no additional memory.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax

from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.harness.timing import Stopwatch, Timing


class _Memory:
    """Expose the bytes of a JAX array through the CUDA array interface, and keep the array alive."""

    def __init__(self, array: jax.Array):
        self._array = jax.block_until_ready(array)
        address = array.unsafe_buffer_pointer()
        shape = (array.size * array.dtype.itemsize,)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


def import_torch() -> Any:
    """Import torch.

    Raises:
      ImportError: torch is not installed.
      NotImplementedError: torch finds no GPU.
    """
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise NotImplementedError("torch finds no GPU")
    return torch


def as_torch(array: jax.Array) -> Any:
    """Return a tensor of the same memory. DLPack is not used, because it supports fp8 only in new versions of jax and
    torch.
    """
    torch = import_torch()
    flat = torch.as_tensor(_Memory(array), device="cuda")
    return flat.view(getattr(torch, array.dtype.name)).view(array.shape)


def contiguous(case: DecodeCase, arrays: DecodeArrays) -> tuple[list[Any], list[Any]]:
    """View the memory of the pool as keys and as values [B, Hkv, context, D] of each call."""
    s = case.shape
    shape = (case.cold_calls, s.batch, s.kv_heads, case.table_pages * s.page_size, s.head_dim)
    elements = case.pool_pages * s.kv_heads * s.page_size * s.head_dim
    k, v = (as_torch(pages).view(-1)[:elements].view(shape) for pages in (arrays.kv.k, arrays.kv.v))
    return case.repeated(list(k[..., : s.context, :])), case.repeated(list(v[..., : s.context, :]))


def check_supported(case: DecodeCase) -> None:
    """Raise NotImplementedError for a case that torch's attention over contiguous keys cannot compute."""
    if case.cache not in ("bf16", "f16"):
        raise NotImplementedError(f"this baseline does not support {case.cache} caches")
    if case.varied:
        raise NotImplementedError("this baseline needs sequences of equal length")
    if case.shape.window is not None or case.shape.soft_cap is not None or case.shape.learned_sinks:
        raise NotImplementedError("this baseline does not support windows, caps or sinks")


def check_accepted(call: Callable[..., Any], *arguments: Any) -> None:
    """Call once. If torch does not support the arguments, raise NotImplementedError with the text of torch's
    warnings.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call(*arguments)
        except RuntimeError as error:
            why = "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in said)
            raise NotImplementedError(why or str(error)) from error


def scaled_dot_product(backend: str, case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time torch's scaled_dot_product_attention with one backend, a name of `torch.nn.attention.SDPBackend`.

    The G query heads of a KV head are passed as G queries of one head [B, Hkv, G, D], so that the kernel reads the keys
    once. No mask is needed, because each query sees all keys.
    """
    torch = import_torch()
    check_supported(case)
    if case.shape.queries > 1:
        raise NotImplementedError("has no causal mask for drafts that end with the keys")
    s = case.shape
    attend = torch.nn.functional.scaled_dot_product_attention
    chosen = getattr(torch.nn.attention.SDPBackend, backend)

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(chosen):
            return attend(q, k, v)

    group = s.q_heads // s.kv_heads
    q = [as_torch(q).view(s.batch, s.kv_heads, group, s.head_dim) for q in arrays.q]
    keys, values = contiguous(case, arrays)
    check_accepted(call, q[0], keys[0], values[0])
    calls = [functools.partial(call, *qkv) for qkv in zip(q, keys, values, strict=True)]
    return stopwatch.graph(calls)


def flex(case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time torch's flex_attention over contiguous keys, compiled for the shapes of the case."""
    torch = import_torch()
    check_supported(case)
    module = importlib.import_module("torch.nn.attention.flex_attention")
    torch.compiler.reset()  # dynamo stops compiling a function after a few different shapes
    s = case.shape
    past = s.context - s.queries
    mask = None
    if s.queries > 1:
        mask = module.create_block_mask(
            lambda b, h, query, key: key <= query + past, None, None, s.queries, s.context, "cuda"
        )
    attend = torch.compile(module.flex_attention, dynamic=False)
    q = [as_torch(q).transpose(1, 2) for q in arrays.q]
    keys, values = contiguous(case, arrays)
    call: Callable[..., Any] = functools.partial(attend, block_mask=mask, enable_gqa=True)
    return stopwatch.graph([functools.partial(call, *qkv) for qkv in zip(q, keys, values, strict=True)])


CONTENDERS = {
    "cudnn": functools.partial(scaled_dot_product, "CUDNN_ATTENTION"),
    "flash": functools.partial(scaled_dot_product, "FLASH_ATTENTION"),
    "math": functools.partial(scaled_dot_product, "MATH"),
    "flex": flex,
}
