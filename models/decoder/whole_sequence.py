"""Forward pass of one sequence with an empty cache, without splitting it into chunks and without other sequences.

`engine.verify` compares tokens of the engine with tokens chosen from the logits of this pass. `checkpoints.calibration`
measures the keys and values that this pass writes to the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from pallas_attn import PAGE_NONE
from pallas_attn.models.config import DeepseekV4Config, ModelConfig
from pallas_attn.models.decoder.caches import Caches
from pallas_attn.models.decoder.model import Step
from pallas_attn.models.decoder.step_metadata import GroupTables, StepMetadata

PAGE_SIZE = 64
"""Tokens per page of the sequence's cache."""


def page_size_of(config: ModelConfig, least: int = PAGE_SIZE) -> int:
    """Return the smallest supported number of tokens per page that is at least `least`. Pages of DeepSeek-V4 have whole
    entries; other models support every size."""
    unit = config.page_unit if isinstance(config, DeepseekV4Config) else 1
    return -(-least // unit) * unit


def pad_tokens(tokens: Sequence[int]) -> Int32[np.ndarray, "T"]:
    """Return token ids padded with zeros to a power of two, at least 256, so that few different lengths are
    compiled."""
    padded = np.zeros(power_of_two(len(tokens), 256), np.int32)
    padded[: len(tokens)] = tokens
    return padded


def power_of_two(size: int, smallest: int) -> int:
    """Return the smallest power of two that is at least `size` and `smallest`. `smallest` is a power of two."""
    return max(smallest, 1 << (size - 1).bit_length())


def run_sequence(
    step: Step,
    weights: list[Array],
    allocate: Callable[[int, int], Caches],
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
    logit_rows: Int32[Array, "n"],
    page_size: int = PAGE_SIZE,
) -> tuple[Float32[Array, "n V"], Caches]:
    """Run a padded sequence. Return the logits at some positions, and the filled caches, whose page i has the tokens
    from position i · page_size on.

    Args:
      step, weights: the model as a function and its weights, from `split_model`.
      allocate: `allocate(num_pages, page_size)` returns empty caches of all layers.
      tokens: result of `pad_tokens`.
      num_tokens: number of tokens that are not padding.
      logit_rows: positions of the logits.
      page_size: result of `page_size_of`.
    """
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    num_pages = -(-tokens.shape[0] // page_size)
    tables = GroupTables(
        slots=jnp.where(positions < num_tokens, positions, PAGE_NONE),
        decode_block_tables=jnp.zeros((0, num_pages), jnp.int32),
        prefill_block_tables=jnp.arange(num_pages, dtype=jnp.int32)[None],
    )
    metadata = StepMetadata(
        positions=positions,
        groups=(tables,),
        decode_kv_lens=jnp.zeros(0, jnp.int32),
        cu_q_lens=jnp.stack([jnp.zeros_like(num_tokens), num_tokens]),
        prefill_kv_lens=num_tokens[None],
        logit_rows=logit_rows,
    )
    return step(weights, tokens, allocate(num_pages, page_size), metadata)
