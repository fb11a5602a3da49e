"""Every configuration that has to pass the gate, by name."""

from __future__ import annotations

from tests.aot.case import Case
from tests.aot.portable import PORTABLE

CASES: dict[str, Case] = {**PORTABLE}

ON_BOTH_PLUGINS = frozenset({"experts-64-tokens", "xla-paged-decode-bf16"})
"""Cases that the other plugin compiles in the ordinary run too: one of each kernel. The rest are `slow` there."""
