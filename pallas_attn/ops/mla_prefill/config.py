"""Settings of `mla_prefill`.

New tokens attend to a cached prefix of latents in one of two forms. Expanded: latents are multiplied by W_UK and W_UV
to keys and values of each head, one chunk of the prefix at a time. Absorbed: queries are multiplied by W_UK and outputs
by W_UV, so that all heads read the latents; one block of new tokens at a time.
"""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import device, tuning

MIN_BLOCK_TOKENS = 128
"""Minimum number of packed new tokens per block in the absorbed form.

A call with at most this number of tokens has one block, which is computed without a loop, even if no sequence has a
prefix. A loop is slower: on an H200 it takes 16 us even if it ends immediately, and it starts only after the attention
of the new tokens to each other.
"""

FILLED_ROWS = 128
"""Query rows (query tokens times heads) that are passed to `mla_decode` as one sequence in the absorbed form.

Several query tokens of a sequence together fill a tile of the kernel, and the prefix is read once for all of them.
"""

BLOCK_ROWS = 8192
"""Query rows (query tokens times heads) per block in the absorbed form, if these are at least `MIN_BLOCK_TOKENS`
tokens.
"""


@dataclasses.dataclass(frozen=True)
class PrefixChunkConfig:
    """Chunk length of an expanded prefix.

    Long chunks take more memory for keys and values. Short chunks take more merges: merging the result of a chunk
    reads and writes the outputs of all queries, 16 bytes per element, which takes as long on an H200 as attention to
    500 tokens. A chunk has a fixed shape, so a partly filled chunk takes as long to expand as a full chunk.

    Attributes:
      piece_tokens: prefix tokens per chunk, of all sequences together.
    """

    piece_tokens: int

    def __post_init__(self) -> None:
        if self.piece_tokens < 1:
            raise ValueError(f"{self.piece_tokens=} must be at least 1")


def prefix_chunk_config(heads: int, width: int) -> PrefixChunkConfig:
    """Return the chunk length: the measured length for this device if there is one, else 4096 on GPUs and 1024
    elsewhere.

    Args:
      heads: Hq, query heads.
      width: nope + R + v, columns of a key and a value of one head together.
    """
    on_gpu = device.current().platform == "gpu"
    key = {"heads": heads, "width": width}
    return tuning.lookup("mla_prefill", key, PrefixChunkConfig, lambda: PrefixChunkConfig(4096 if on_gpu else 1024))


@dataclasses.dataclass(frozen=True)
class AbsorptionConfig:
    """Number of new tokens per sequence up to which the absorbed form is faster.

    Expanding a prefix token costs the same for any number of new tokens, so the expanded form is slow for few new
    tokens. By the number of multiply-adds, the absorbed form is faster up to L·(nope + v) / (2·L - nope - v) new
    tokens, which is 170 for DeepSeek-V3's widths. The expanded form also writes and reads keys and values, so the
    measured limit is higher: on an H100, about 320 new tokens with 128 heads and 512 with 16 heads.

    Attributes:
      max_new_tokens: largest number of new tokens for which the absorbed form is faster; 0 if it never is.
    """

    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"{self.max_new_tokens=} must be at least 0")


def absorption_config(heads: int, latent_dim: int, expanded: int, *, quantised: bool) -> AbsorptionConfig:
    """Return the number of new tokens per sequence up to which the absorbed form is faster.

    Args:
      heads: Hq, query heads.
      latent_dim: L, columns of a latent.
      expanded: nope + v, columns per head that are computed from a latent.
      quantised: whether the cache is quantised.
    """
    key = {"heads": heads, "latent_dim": latent_dim, "expanded": expanded, "quantised": quantised}
    measured_factor = 7 / 4 if heads > 32 else 3  # measured limit divided by the limit from the multiply-adds
    heuristic = AbsorptionConfig(int(measured_factor * latent_dim * expanded / max(1, 2 * latent_dim - expanded)))
    return tuning.lookup("mla_prefill/absorbed", key, AbsorptionConfig, lambda: heuristic)


def block_tokens(tokens: int, heads: int) -> int:
    """Return the number of packed new tokens per block in the absorbed form.

    Large blocks take more memory for queries and outputs in latent space, L columns per head. They also contain more
    tokens without a prefix, which take time too: in a step with chunked prompts, usually one prompt has a prefix, and
    all others start at their first token.

    Args:
      tokens: T, packed new tokens of the call.
      heads: Hq, query heads.
    """
    return min(tokens, max(MIN_BLOCK_TOKENS, BLOCK_ROWS // heads))
