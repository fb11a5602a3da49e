"""Drafts by a smaller model of the same vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from models.config import HeadWindows, ModelConfig, cache_groups
from models.decoder import Caches, Decoder, GroupTables, StepMetadata, split_model
from models.decoder.mesh import bytes_on_device
from models.engine.sampler import draw
from models.engine.speculation.proposer import DraftRows, ObservedStep, Proposer, ProposerSizes


class DraftModelProposer(Proposer):
    """Proposes drafts by decoding with another model, one token of each row at a time.

    A draft is sampled with the request's parameters and the noise of the target's draw at the same position. So draft
    and target agree more often, the more similar their distributions are. The model has its own caches, which use the
    target's page tables. Therefore a prefix found in the prefix cache is also in the draft model's cache. The model
    computes prompts when the target does. In steps without drafts it computes every token, so that its cache is
    complete for later steps with drafts.

    Raises:
      NotImplementedError: the model's heads have different windows.
    """

    def __init__(self, model: Decoder):
        """Use the model's weights without a copy."""
        if any(isinstance(group.window, HeadWindows) for group in cache_groups(model.config)):
            raise NotImplementedError("draft model: expected heads with equal windows, got windows per head")
        self._model = model
        self._step, self.weights = split_model(model)
        self.draft_bytes = sum(map(bytes_on_device, self.weights))

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raise ValueError unless both models have the same vocabulary size and mesh."""
        wanted, got = target.vocab_size, self._model.config.vocab_size
        if got != wanted:
            raise ValueError(f"draft model: expected the target's vocabulary of {wanted} tokens, got {got}")
        if self._model.mesh != sizes.mesh:
            raise ValueError("draft model: expected one loaded for the engine's mesh, got one on other devices")

    def allocate(self, sizes: ProposerSizes) -> Caches:
        """Allocate empty caches, with one page for each page row of the target's lane (see `ProposerSizes.lane`)."""
        group, _ = sizes.lane
        return self._model.allocate_caches(sizes.groups[group].num_rows, sizes.page_size)

    def propose(
        self, weights: Any, state: Caches, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Caches]:
        """Decode `num_drafts` tokens of each row."""
        drafts: list[Array] = []
        decode = jax.jit(self._decode)  # all iterations after the first share one lowered function
        for ahead in range(num_drafts):
            if drafts:
                metadata = in_lane(rows.decode_step(ahead), rows.lane)
                logits, state = decode(weights, drafts[-1], state, metadata)
            else:
                logits, state = self._newest(weights, state, rows)
            sampling = dataclasses.replace(rows.sampling, position=rows.sampling.position + ahead)
            drafts.append(jnp.maximum(draw(logits, sampling), 0))
        return jnp.stack(drafts, axis=1), state

    def observe(self, weights: Any, state: Caches, step: ObservedStep) -> Caches:
        """Compute the cache entries that `propose` did not: of prompt tokens, and of all tokens in a step without
        drafts."""
        metadata = in_lane(step.metadata, step.lane)
        if metadata.num_decode and not step.num_drafts:
            _, state = self._newest(weights, state, step.rows)
        tokens = step.tokens[metadata.num_decode :]
        if not tokens.shape[0]:
            return state
        metadata = dataclasses.replace(_without_decode_rows(metadata), logit_rows=jnp.zeros(1, jnp.int32))
        return self._decode(weights, tokens, state, metadata)[1]

    def _newest(self, weights: Any, caches: Caches, rows: DraftRows) -> tuple[Array, Caches]:
        """Compute the newest token of each row and the token before it. If all drafts of the last step were accepted,
        the token before is the last draft, which the draft model has not had as input yet."""
        tokens = jnp.stack([rows.written_at(rows.lens - 2), rows.tokens], axis=1).reshape(-1)
        return self._decode(weights, tokens, caches, in_lane(rows.decode_step(queries=2), rows.lane))

    def _decode(
        self, weights: Any, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Array, Caches]:
        return self._step(weights, tokens, caches, metadata)


def in_lane(metadata: StepMetadata, lane: tuple[int, int]) -> StepMetadata:
    """Make metadata for caches whose pages are the page rows of one lane (cache group, head) of the target."""
    group, head = lane

    def of_head(array: Array, rank: int) -> Array:
        return array if array.ndim == rank else array[:, head]

    given = metadata.groups[group]
    tables = GroupTables(
        of_head(given.slots, 1), of_head(given.decode_block_tables, 2), of_head(given.prefill_block_tables, 2)
    )
    return dataclasses.replace(metadata, groups=(tables,))


def _without_decode_rows(metadata: StepMetadata) -> StepMetadata:
    """Make the metadata of a step's prefill tokens."""
    first = metadata.num_decode
    groups = tuple(
        dataclasses.replace(group, slots=group.slots[first:], decode_block_tables=group.decode_block_tables[:0])
        for group in metadata.groups
    )
    return dataclasses.replace(
        metadata,
        positions=metadata.positions[first:],
        groups=groups,
        decode_kv_lens=metadata.decode_kv_lens[:0],
        decode_q_lens=None,
        decode_queries=1,
    )
