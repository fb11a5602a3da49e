"""What can be turned in `ragged_attention`."""

from __future__ import annotations

from pallas_attn import tuning
from pallas_attn.ops.common.online_softmax import XlaConfig, prefill_heuristic, tile_queries


def xla_config(num_tokens: int, num_sequences: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation, for this many packed queries and sequences."""

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        return prefill_heuristic(rows=-(-num_tokens // tile) + num_sequences, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    return tuning.lookup("ragged_attention/xla", key, XlaConfig, heuristic)
