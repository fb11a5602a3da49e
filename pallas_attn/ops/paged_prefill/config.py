"""What can be turned in `paged_prefill`."""

from __future__ import annotations

from pallas_attn import tuning
from pallas_attn.ops.common.online_softmax import XlaConfig, prefill_heuristic, tile_queries


def xla_config(num_tokens: int, num_sequences: int, rows_per_sequence: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation.

    Args:
      num_tokens: T, packed queries.
      num_sequences: S.
      rows_per_sequence: KV heads that walk pages on their own.
    """

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        rows = (-(-num_tokens // tile) + num_sequences) * rows_per_sequence
        return prefill_heuristic(rows=rows, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences, "rows_per_sequence": rows_per_sequence}
    return tuning.lookup("paged_prefill/xla", key, XlaConfig, heuristic)
