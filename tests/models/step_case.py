"""Steps of made-up traffic: metadata for any mix of decode rows and prefill chunks, over scattered pages."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from models.metadata import StepMetadata
from models.model import Caches, DeepSeek
from pallas_attn import PagedLatent

PAGE_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Pages:
    """A block table for each sequence, of pages in no order; no page is shared and page 0 is nobody's."""

    tables: np.ndarray

    @staticmethod
    def scatter(num_sequences: int, width: int, seed: int = 0) -> Pages:
        ids = 1 + np.random.default_rng(seed).permutation(num_sequences * width)
        return Pages(ids.reshape(num_sequences, width).astype(np.int32))

    def allocate(self, model: DeepSeek, fill: float = 0.0) -> Caches:
        """Caches of every layer, filled with what nobody should read."""
        spec = model.cache_spec(num_pages=self.tables.size + 1, page_size=PAGE_SIZE)
        return tuple(
            PagedLatent(jnp.full_like(PagedLatent.allocate(spec).pages, fill)) for _ in range(len(model.layers))
        )

    def slots(self, sequence: int, positions: np.ndarray) -> np.ndarray:
        return self.tables[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def latents(self, caches: Caches, sequence: int, length: int) -> np.ndarray:
        """[layers, length, L + R]: what the caches hold of a sequence."""
        slots = self.slots(sequence, np.arange(length))
        return np.stack([np.asarray(c.pages, np.float32).reshape(-1, c.pages.shape[-1])[slots] for c in caches])


def step(
    pages: Pages,
    decode: list[tuple[int, int]] = [],  # noqa: B006 - not written to
    prefill: list[tuple[int, int, int]] = [],  # noqa: B006
    *,
    idle_rows: int = 0,
    padding: int = 0,
    logit_rows: list[int] | None = None,
) -> StepMetadata:
    """Metadata of (sequence, position) decode rows and (sequence, start, stop) prefill chunks.

    `idle_rows` are added to the decode rows and `padding` tokens to the prefill part.
    """
    where = [(s, np.array([p])) for s, p in decode] + [(-1, np.zeros(1, int))] * idle_rows
    where += [(s, np.arange(start, stop)) for s, start, stop in prefill] + [(-1, np.zeros(padding, int))]
    slots = [np.full_like(p, -1) if s < 0 else pages.slots(s, p) for s, p in where]
    width = pages.tables.shape[1]
    decode_tables = np.concatenate([pages.tables[[s for s, _ in decode]], np.full((idle_rows, width), 2147480000)])
    total = sum(len(p) for _, p in where)
    return StepMetadata(
        positions=_int32(np.concatenate([p for _, p in where])),
        slots=_int32(np.concatenate(slots)),
        decode_block_tables=_int32(decode_tables.reshape(-1, width)),
        decode_kv_lens=_int32([p + 1 for _, p in decode] + [0] * idle_rows),
        prefill_block_tables=_int32(pages.tables[[s for s, _, _ in prefill]].reshape(-1, width)),
        cu_q_lens=_int32(np.cumsum([0] + [stop - start for _, start, stop in prefill])),
        prefill_kv_lens=_int32([stop for _, _, stop in prefill]),
        logit_rows=_int32(np.arange(total) if logit_rows is None else logit_rows),
    )


def _int32(values) -> jnp.ndarray:
    return jnp.asarray(np.asarray(values), jnp.int32)
