"""What can be turned in `paged_decode`."""

from __future__ import annotations

from pallas_attn import tuning
from pallas_attn.ops.common.online_softmax import XlaConfig, decode_heuristic


def xla_config(rows: int, heads: int, head_dim: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation.

    Args:
      rows: rows that walk pages.
      heads: KV heads a row holds.
      head_dim: D.
    """
    key = {"rows": rows, "heads": heads, "head_dim": head_dim}
    return tuning.lookup("paged_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, heads * head_dim))
