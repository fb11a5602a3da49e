"""SGLang's Triton kernels as baselines, over the same tokens as our kernels.

SGLang's pools have all heads of a token next to each other, so keys and values are first copied into this order.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.cases.prefill import PagedPrefillCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

OPS = "sglang.kernels.ops.attention"
SPLITS, MLA_TOKENS_OF_SPLIT = 8, 32
"""Maximum number of KV splits per sequence in decode, and tokens per split in decode over latents.

Over latents, the maximum number of splits is the number of multiprocessors or of splits of `MLA_TOKENS_OF_SPLIT`
tokens, whichever is smaller, rounded up to a power of two. SGLang's Triton backend uses the same values.
"""


def pages(case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time SGLang's decode attention over keys and values. SGLang computes the number of KV splits and the list of
    slots once per step, so they are not timed.
    """
    torch = import_torch()
    s = case.shape
    decode = importlib.import_module(f"{OPS}.decode_attention").decode_attention_fwd
    if case.cache != "bf16" or s.learned_sinks or s.queries > 1 or s.window is not None:
        raise NotImplementedError(
            "this baseline supports only bf16 and one query per sequence, without sinks and windows"
        )
    k, v = (_pool(pages) for pages in (arrays.kv.k, arrays.kv.v))
    shared = _Rows(torch, as_torch(arrays.kv_lens), s.q_heads, s.kv_heads, s.head_dim, SPLITS)

    def call(q: Any, out: Any, slots: Any) -> Any:
        decode(
            q, k, v, out, *shared.metadata(slots), s.head_dim**-0.5, 1.0, 1.0, logit_cap=s.soft_cap or 0.0, use_pdl=True
        )
        return out[:, None]

    calls = []
    for q, table in zip(arrays.q, arrays.block_tables, strict=True):
        queries, slots = as_torch(q)[:, 0], shared.slots(as_torch(table), s.page_size)
        calls.append(functools.partial(call, queries, queries.new_empty(queries.shape), slots))
    return stopwatch.graph(calls, compared=True)


def latents(case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Time SGLang's decode attention over latents. The list of slots and the concatenation of `q_latent` and `q_rope`
    are not timed.
    """
    torch = import_torch()
    s = case.shape
    decode = importlib.import_module(f"{OPS}.decode_attention").decode_attention_fwd
    if case.cache != "bf16" or s.queries > 1:
        raise NotImplementedError("this baseline supports only bf16 and one query per sequence")
    k = as_torch(arrays.cache.pages).view(-1, 1, s.latent_dim + s.rope_dim)
    cores, most = _multiprocessors(torch), -(-int(case.lens.max()) // MLA_TOKENS_OF_SPLIT)
    splits = max(SPLITS, min(_power_of_two(cores), _power_of_two(most)))
    shared = _Rows(torch, as_torch(arrays.kv_lens), s.heads, 1, s.latent_dim, splits)

    def call(q: Any, out: Any, slots: Any) -> Any:
        values = k[..., : s.latent_dim]
        decode(q, k, values, out, *shared.metadata(slots), case.sm_scale, 1.0, 1.0, has_mla=True, use_pdl=True)
        return out[:, None]

    calls = []
    for own in arrays.owns:
        q = torch.cat([as_torch(own["q_latent"]), as_torch(own["q_rope"])], -1)[:, 0]
        slots = shared.slots(as_torch(own["block_tables"]), s.page_size)
        calls.append(functools.partial(call, q, q.new_empty(*q.shape[:2], s.latent_dim), slots))
    return stopwatch.graph(calls, compared=True)


def chunk(case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time SGLang's prefill attention. It reads a cached prefix from the pool, and the keys and values of new tokens
    from contiguous arrays.
    """
    torch = import_torch()
    case.check_one_length()
    s = case.shape
    extend = importlib.import_module(f"{OPS}.extend_attention").extend_attention_fwd
    if case.cache != "bf16" or s.learned_sinks or s.window is not None:
        raise NotImplementedError("this baseline supports only bf16 without sinks and windows")
    k, v = (_pool(pages) for pages in (arrays["kv"].k, arrays["kv"].v))
    slots = _all_slots(torch, as_torch(arrays["block_tables"]), s.page_size)
    prefix, new = slots[:, : s.cached_tokens], slots[:, s.cached_tokens : s.cached_tokens + s.new_tokens]
    k_new, v_new = (pool[new.reshape(-1)] for pool in (k, v))
    starts = torch.arange(s.sequences + 1, dtype=torch.int32, device="cuda") * s.cached_tokens
    metadata = as_torch(arrays["cu_q_lens"]), starts, prefix.reshape(-1), None, True, None, s.new_tokens
    scale, cap = s.head_dim**-0.5, s.soft_cap or 0.0

    def call(q: Any, out: Any) -> Any:
        extend(q, k_new, v_new, out, k, v, *metadata, 1.0, 1.0, sm_scale=scale, logit_cap=cap)
        return out

    queries = [as_torch(q) for q in arrays["q"]]
    return stopwatch.graph([functools.partial(call, q, q.new_empty(q.shape)) for q in queries], compared=True)


class _Rows:
    """Metadata of a decode step, as in SGLang's Triton backend: number of KV splits per sequence, and buffers for the
    results of the splits.
    """

    def __init__(self, torch: Any, lens: Any, heads: int, kv_heads: int, width: int, most_splits: int):
        self._torch, self._lens, self._most = torch, lens, most_splits
        batch = len(lens)
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._starts = torch.cat([zero, lens.cumsum(0).to(torch.int32)])
        self._splits = torch.empty(batch, dtype=torch.int32, device="cuda")
        count = importlib.import_module(f"{OPS}.metadata").get_num_kv_splits_triton
        sizes = batch, 1, heads, kv_heads, most_splits, _multiprocessors(torch)
        count[(1,)](self._splits, lens, *sizes, MAX_NUM_SEQ=max(256, _power_of_two(batch)))
        self._results = torch.empty(batch, heads, most_splits, width, device="cuda")
        self._lse = torch.empty(batch, heads, most_splits, device="cuda")

    def slots(self, table: Any, page_size: int) -> Any:
        """Return the slots [sum of lengths] of the tokens of all sequences, in the order of the sequences."""
        every = _all_slots(self._torch, table, page_size)
        held = self._torch.arange(every.shape[1], device="cuda") < self._lens[:, None]
        return every[held]

    def metadata(self, slots: Any) -> tuple[Any, ...]:
        return self._starts, slots, self._results, self._lse, self._splits, self._most


def _all_slots(torch: Any, table: Any, page_size: int) -> Any:
    """Return the slots (int64 [B, tokens]) of all tokens of a block table. The slot of a token is page * page size +
    position.
    """
    slots = table.long()[:, :, None] * page_size + torch.arange(page_size, device="cuda")
    return slots.reshape(len(table), -1)


def _pool(pages: Any) -> Any:
    """Copy pages [N, H, ps, D] to SGLang's pool layout [N * ps, H, D]."""
    tokens = as_torch(pages).transpose(1, 2)
    return tokens.reshape(-1, *tokens.shape[2:])


def _multiprocessors(torch: Any) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


NAME = "sglang-triton"
MLA_CONTENDERS = {NAME: latents}
PREFILL_CONTENDERS = {NAME: chunk}
DECODE_CONTENDERS = {NAME: pages}
