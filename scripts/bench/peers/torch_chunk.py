"""torch's attention as a baseline, for prompt chunks of equal length with contiguous keys and values."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from scripts.bench.cases.prefill import RaggedAttentionCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, check_accepted, import_torch


def by_head(case: RaggedAttentionCase, array: Any) -> Any:
    """View an array [S·tokens, H, D] of S sequences as a tensor [S, H, tokens, D] in the same memory."""
    return as_torch(array).unflatten(0, (case.shape.sequences, -1)).transpose(1, 2)


def time_calls(
    call: Callable[..., Any], case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch
) -> Timing:
    """Time call(q, k, v) with tensors [S, H, tokens, D]. The output is transposed to [S, tokens, H, D], our layout."""
    k, v = (by_head(case, arrays[name]) for name in ("k", "v"))

    def attend(q: Any) -> Any:
        return call(q, k, v).transpose(1, 2)

    calls = [functools.partial(attend, by_head(case, q)) for q in arrays["q"]]
    return stopwatch.graph(calls, compared=True)


def scaled_dot_product(backend: str, case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time torch's scaled_dot_product_attention with one backend, a name of `torch.nn.attention.SDPBackend`."""
    torch = import_torch()
    case.check_one_length()
    s = case.shape
    options: dict[str, Any] = {"is_causal": True}
    if s.cached_tokens:
        if backend != "FLASH_ATTENTION":
            raise NotImplementedError("has no causal mask that ends with the keys")
        bias = torch.nn.attention.bias.causal_lower_right(s.new_tokens, s.new_tokens + s.cached_tokens)
        options = {"attn_mask": bias}
    if s.q_heads != s.kv_heads:
        options["enable_gqa"] = True
    chosen = getattr(torch.nn.attention.SDPBackend, backend)

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    check_accepted(call, *(by_head(case, array) for array in (arrays["q"][0], arrays["k"], arrays["v"])))
    return time_calls(call, case, arrays, stopwatch)


def flex(case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time torch's flex_attention, compiled for the shapes of the case."""
    torch = import_torch()
    case.check_one_length()
    module = importlib.import_module("torch.nn.attention.flex_attention")
    torch.compiler.reset()  # dynamo stops compiling a function after a few different shapes
    s = case.shape

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        del batch, head
        return key <= query + s.cached_tokens

    sizes = (s.new_tokens, s.new_tokens + s.cached_tokens)
    mask = module.create_block_mask(causal, None, None, *sizes, "cuda", _compile=True)
    attend = torch.compile(module.flex_attention, dynamic=False)
    grouped = s.q_heads != s.kv_heads
    return time_calls(functools.partial(attend, block_mask=mask, enable_gqa=grouped), case, arrays, stopwatch)


CONTENDERS = {
    "cudnn": functools.partial(scaled_dot_product, "CUDNN_ATTENTION"),
    "flash": functools.partial(scaled_dot_product, "FLASH_ATTENTION"),
    "math": functools.partial(scaled_dot_product, "MATH"),
    "flex": flex,
}
