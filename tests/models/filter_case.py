"""Token filters for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.models.engine_case import VOCAB_SIZE


class Third:
    """Token filter that allows a third of the tokens, depending on all output tokens; all tokens after 5 and 9.

    It raises ValueError if an earlier call has excluded one of the output tokens.

    Attributes:
      seen: output tokens of each call.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE):
        self._vocab_size = vocab_size
        self.seen: list[list[int]] = []

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        self.seen.append([*output_ids])
        for i, token in enumerate(output_ids):
            if not self._is_allowed(output_ids[:i])[token]:
                raise ValueError(f"token {token} is excluded after {output_ids[:i]}")
        if len(output_ids) in (5, 9):
            return None
        bits = self._is_allowed(output_ids)
        return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]

    def _is_allowed(self, output_ids: Sequence[int]) -> np.ndarray:
        tokens = np.arange(self._vocab_size)
        return (tokens + sum(output_ids)) % 3 == 0 if len(output_ids) not in (5, 9) else tokens >= 0
