"""Sizes of the engine for the prompts of one run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_attn.models.checkpoints import load_kv_scales
from pallas_attn.models.cli.command_line import as_usage_error
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import KVScales
from pallas_attn.models.engine import EngineConfig
from pallas_attn.models.engine.config import powers

STEP_TOKENS = 512
"""Default of --max-batched-tokens."""

DEMO_STEP_TOKENS = 64
"""Default of --max-batched-tokens for the default prompts, which shows prompts in chunks, and for --batch-invariant,
where every step is padded to this number."""

CHAT_TOKENS = 8192
"""Default of --max-model-len with --chat."""

MAX_PADDING = 2**16
"""Maximum number of padding tokens of a run in steps that admit later requests. If a single prefill bucket could cause
more padding, several buckets are compiled."""


def engine_config(options: argparse.Namespace, config: ModelConfig, prompt_lens: Sequence[int]) -> EngineConfig:
    """Return the engine configuration. Sizes that are not given as options are derived from the prompts and other
    sizes. All sizes are per data rank: a group of devices with its own requests.

    Few batch shapes are compiled: one number of decode rows up to 64 requests, and one number of prompt tokens unless
    many requests wait. Sizes are rounded up, so that runs with similar prompts have equal shapes and find the compiled
    programs of earlier runs in the compilation cache. With --batch-invariant, sizes that affect the bits of the results
    do not depend on the prompts.

    Args:
      options: the options.
      config: configuration of the model.
      prompt_lens: number of tokens of each prompt. With --chat, the maximum number of tokens of a conversation without
        the last answer.
    """
    of_rank = -(-len(prompt_lens) // (options.mesh or {}).get("data", 1))  # maximum number of requests per data rank
    lengths = sorted(prompt_lens)[-of_rank:]
    num_seqs, num_tokens, num_pages = options.max_num_seqs, options.max_batched_tokens, options.num_pages
    is_demo = options.prompt is None and options.prompt_ids is None and not options.chat
    step_tokens = DEMO_STEP_TOKENS if is_demo or options.batch_invariant else STEP_TOKENS
    if num_seqs is None:
        num_seqs = options.decode_buckets[-1] if options.decode_buckets else min(4, num_tokens or 4)
    if num_tokens is None:
        whole = 0 if options.chunked_prefill else lengths[-1]
        num_tokens = options.prefill_buckets[-1] if options.prefill_buckets else max(step_tokens, num_seqs, whole)
    if num_pages is None:
        longest = config.max_position_embeddings if options.max_model_len is None else options.max_model_len
        most = [min(length + options.max_tokens, longest) for length in lengths[-num_seqs:]]
        num_pages = rounded_up(sum(-(-length // options.page_size) for length in most))
    sizes = EngineConfig(
        num_pages=num_pages,
        max_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        max_model_len=options.max_model_len,
        separate_prefill=False,
        history=None,
        **engine_fields(options),
    )
    if options.batch_invariant:
        return sizes
    if options.decode_buckets is None:
        num_seqs = min(num_seqs, of_rank)
        sizes = dataclasses.replace(sizes, max_num_seqs=num_seqs, decode_buckets=powers(4, 64, num_seqs))
    if options.prefill_buckets is None:
        most = max(num_seqs, min(sum(lengths), sizes.prefill_seqs * lengths[-1]))  # prompt tokens of any step
        num_tokens = min(num_tokens, max(32, 1 << (most - 1).bit_length()))
        padding = max(of_rank - sizes.max_num_seqs, 0) * num_tokens
        buckets = (num_tokens,) if padding <= MAX_PADDING else powers(4, 32, num_tokens)
        sizes = dataclasses.replace(sizes, max_batched_tokens=num_tokens, prefill_buckets=buckets)
    return sizes


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineConfig` that options set directly. Raise UsageError if --kv-scales is wrong."""
    names = ("page_size", "max_prefill_seqs", "chunked_prefill", "prefix_caching", "recycling", "decode_buckets")
    names += ("prefill_buckets", "batch_invariant", "cascade_attention")
    given = {name: getattr(options, name) for name in names}
    return {**given, "cache_dtype": options.kv_dtype, "kv_scales": _read_kv_scales(options)}


def rounded_up(number: int) -> int:
    """Return the next number with at most three significant bits, and at least 4: 4, 8, 12, 16, 20, 24, 28, 32, 40,
    48, 56, 64, 80, ..."""
    step = max(4, 1 << max(number.bit_length() - 3, 0))
    return -(-number // step) * step


def _read_kv_scales(options: argparse.Namespace) -> KVScales | None:
    """Read the file of --kv-scales; None without the option. Raise UsageError if this is not possible."""
    if options.kv_scales is None:
        return None
    with (
        as_usage_error(OSError, prefix=f"--kv-scales: cannot read {options.kv_scales}: "),
        as_usage_error(ValueError, prefix="--kv-scales: "),
    ):
        return load_kv_scales(options.kv_scales)
