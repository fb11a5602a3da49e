"""Settings of `mla_prefill`: chunk length of an expanded prefix, and the longest chunk of queries that is absorbed."""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import device, tuning

MIN_BLOCK_TOKENS = 128
"""Smallest block of packed tokens that attends to its prefix absorbed.

A call with at most one block runs without a loop, even if no sequence has a prefix. On an H200 a loop takes 17 us, and
16 us if it ends immediately, and it would wait for the attention of the new tokens among themselves.
"""

FILLED_ROWS = 128
"""Query rows (queries times heads) that one row of `mla_decode` holds. These rows share each read of a prefix."""

BLOCK_ROWS = 8192
"""Query rows that attend to their prefix absorbed at a time, if that is at least `MIN_BLOCK_TOKENS` tokens."""


@dataclasses.dataclass(frozen=True)
class PrefixChunkConfig:
    """Chunk length of an expanded prefix.

    A chunk takes memory for its keys and values. Merging its result reads and writes the outputs of all queries:
    16 bytes per element, which takes as long on an H200 as attention to 500 tokens. The time to expand a chunk does not
    depend on how many tokens the chunk holds.

    Attributes:
      piece_tokens: tokens of a chunk, over all sequences.
    """

    piece_tokens: int

    def __post_init__(self) -> None:
        if self.piece_tokens < 1:
            raise ValueError(f"{self.piece_tokens=} must be at least 1")


def prefix_chunk_config(heads: int, width: int) -> PrefixChunkConfig:
    """Return the chunk length for `heads` query heads.

    Args:
      width: columns of a key and a value of one head together, nope + R + v.
    """
    on_gpu = device.current().platform == "gpu"
    key = {"heads": heads, "width": width}
    return tuning.lookup("mla_prefill", key, PrefixChunkConfig, lambda: PrefixChunkConfig(4096 if on_gpu else 1024))


@dataclasses.dataclass(frozen=True)
class AbsorptionConfig:
    """Number of new tokens up to which queries attend to their prefix absorbed.

    The time to expand a prefix token does not depend on the number of queries, so a few new tokens run faster absorbed.
    Counting multiply-adds, absorbed is faster up to L·(nope + v) / (2·L - nope - v) new tokens of a sequence, which is
    170 at DeepSeek-V3's widths. Expanded keys and values are also written and read again, which takes the same time
    again, and more with few heads. Measured on an H100, absorbed is faster up to about 320 new tokens with 128 heads
    and 512 with 16 heads.

    Attributes:
      max_new_tokens: largest number of new tokens of a sequence for which absorbed is faster; 0 for never.
    """

    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"{self.max_new_tokens=} must be at least 0")


def absorption_config(heads: int, latent_dim: int, expanded: int, *, quantised: bool) -> AbsorptionConfig:
    """Return the number of new tokens up to which absorbed is faster.

    Args:
      heads: query heads.
      latent_dim: L.
      expanded: nope + v, columns that a latent is expanded to per head.
      quantised: whether the cache is quantised.
    """
    key = {"heads": heads, "latent_dim": latent_dim, "expanded": expanded, "quantised": quantised}
    measured_factor = 7 / 4 if heads > 32 else 3  # measured crossing divided by the crossing of the multiply-adds
    heuristic = AbsorptionConfig(int(measured_factor * latent_dim * expanded / max(1, 2 * latent_dim - expanded)))
    return tuning.lookup("mla_prefill/absorbed", key, AbsorptionConfig, lambda: heuristic)


def block_tokens(tokens: int, heads: int) -> int:
    """Return the number of packed tokens that attend to their prefix absorbed at a time.

    A block takes memory for queries and outputs in latent space, and takes time even for tokens without a prefix. In a
    step with chunked prompts, usually one prompt has a prefix and all others start at their first token.
    """
    return min(tokens, max(MIN_BLOCK_TOKENS, BLOCK_ROWS // heads))
