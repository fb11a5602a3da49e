"""What can be turned in `mla_decode`."""

from __future__ import annotations

from pallas_attn import tuning
from pallas_attn.ops.common.online_softmax import XlaConfig, decode_heuristic


def xla_config(rows: int, width: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation, for this many sequences and L + R = `width` columns."""
    key = {"rows": rows, "width": width}
    return tuning.lookup("mla_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, width))
