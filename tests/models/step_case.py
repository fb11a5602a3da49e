"""Metadata of model steps with any decode rows and prompt chunks, over pages in random order."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import PagedKV, PagedLatent
from pallas_attn.models.decoder import Caches, Decoder, GroupTables, StepMetadata
from pallas_attn.models.decoder.caches import IndexedLatent
from pallas_attn.models.decoder.mla import latents_of

PAGE_SIZE = 8


def latent_pages(caches: Caches) -> list[jax.Array]:
    """Return copies of the pages of all layers, [N, ps, L + R] each."""
    return [latents_of(cache).pages for cache in caches if isinstance(cache, PagedLatent | IndexedLatent)]


@dataclasses.dataclass(frozen=True)
class Pages:
    """Block tables [sequences, P] with page ids in random order. No two entries are equal, and page 0 is unused."""

    tables: np.ndarray

    @staticmethod
    def scatter(num_sequences: int, width: int, seed: int = 0) -> Pages:
        ids = 1 + np.random.default_rng(seed).permutation(num_sequences * width)
        return Pages(ids.reshape(num_sequences, width).astype(np.int32))

    def allocate(self, model: Decoder, fill: float = 0.0) -> Caches:
        """Allocate the caches of all layers. Every element has the value `fill`."""
        caches = model.allocate_caches(self.tables.size + 1, PAGE_SIZE)
        return jax.tree.map(lambda pages: jnp.full_like(pages, fill), caches)

    def slots(self, sequence: int, positions: np.ndarray) -> np.ndarray:
        return self.tables[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def latents(self, caches: Caches, sequence: int, length: int) -> np.ndarray:
        """Return the cached latents of a sequence, [layers, length, L + R]."""
        slots = self.slots(sequence, np.arange(length))
        layers = [np.asarray(pages, np.float32) for pages in latent_pages(caches)]
        return np.stack([pages.reshape(-1, pages.shape[-1])[slots] for pages in layers])

    def index_keys(self, caches: Caches, sequence: int, length: int) -> np.ndarray:
        """Return the cached index keys of a sequence, [layers, length, Di]."""
        slots = self.slots(sequence, np.arange(length))
        layers = [np.asarray(cache.index.keys) for cache in caches if isinstance(cache, IndexedLatent)]
        return np.stack([keys.reshape(-1, keys.shape[-1])[slots] for keys in layers])

    def keys_and_values(self, caches: Caches, sequence: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cached keys and values of a sequence, each [layers, Hkv, length, D]."""
        pages, offsets = np.divmod(self.slots(sequence, np.arange(length)), PAGE_SIZE)

        def gather(array: jax.Array) -> np.ndarray:
            return np.asarray(array).swapaxes(1, 2)[pages, offsets].swapaxes(0, 1)

        layers = [(gather(cache.k), gather(cache.v)) for cache in caches if isinstance(cache, PagedKV)]
        keys, values = (np.stack(arrays) for arrays in zip(*layers, strict=True))
        return keys, values


def step(
    pages: Pages,
    decode: list[tuple[int, int]] = [],  # noqa: B006 - the list is not modified
    prefill: list[tuple[int, int, int]] = [],  # noqa: B006
    *,
    idle_rows: int = 0,
    padding: int = 0,
    logit_rows: list[int] | None = None,
) -> StepMetadata:
    """Return the metadata of a step.

    Args:
      decode: (sequence, position of the new token) of each decode row.
      prefill: (sequence, start, stop) of each prompt chunk, as positions.
      idle_rows: number of unused decode rows that are added.
      padding: number of unused tokens that are added after the chunks.
      logit_rows: indices of the tokens whose logits are computed; None for all.
    """
    where = [(s, np.array([p])) for s, p in decode] + [(-1, np.zeros(1, int))] * idle_rows
    where += [(s, np.arange(start, stop)) for s, start, stop in prefill] + [(-1, np.zeros(padding, int))]
    slots = [np.full_like(p, -1) if s < 0 else pages.slots(s, p) for s, p in where]
    width = pages.tables.shape[1]
    decode_tables = np.concatenate([pages.tables[[s for s, _ in decode]], np.full((idle_rows, width), 2147480000)])
    total = sum(len(p) for _, p in where)
    tables = GroupTables(
        slots=_int32(np.concatenate(slots)),
        decode_block_tables=_int32(decode_tables.reshape(-1, width)),
        prefill_block_tables=_int32(pages.tables[[s for s, _, _ in prefill]].reshape(-1, width)),
    )
    return StepMetadata(
        positions=_int32(np.concatenate([p for _, p in where])),
        groups=(tables,),
        decode_kv_lens=_int32([p + 1 for _, p in decode] + [0] * idle_rows),
        cu_q_lens=_int32(np.cumsum([0] + [stop - start for _, start, stop in prefill])),
        prefill_kv_lens=_int32([stop for _, _, stop in prefill]),
        logit_rows=_int32(np.arange(total) if logit_rows is None else logit_rows),
    )


def _int32(values) -> jnp.ndarray:
    return jnp.asarray(np.asarray(values), jnp.int32)
