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
    """Decodes with another model, one token of each row at a time.

    A draft is chosen as the request's tokens are, with the noise that the target's draw in its place has, so that the
    two agree the more often the more alike their distributions are. The model has caches of its own in the target's
    pages, which therefore hold what it needs of prefixes that are found, too. It computes prompts when the target does,
    and in steps without drafts every token, to be ready for steps with drafts.

    Raises:
      NotImplementedError: a model whose heads have windows of their own.
    """

    def __init__(self, model: Decoder):
        """Uses the model's weights where they are."""
        if any(isinstance(group.window, HeadWindows) for group in cache_groups(model.config)):
            raise NotImplementedError("draft model: expected layers whose heads all see the same, got windows of heads")
        self._model = model
        self._step, self.weights = split_model(model)
        self.draft_bytes = sum(map(bytes_on_device, self.weights))

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raises ValueError unless both models have as many tokens, and the same devices."""
        wanted, got = target.vocab_size, self._model.config.vocab_size
        if got != wanted:
            raise ValueError(f"draft model: expected the target's vocabulary of {wanted} tokens, got {got}")
        if self._model.mesh != sizes.mesh:
            raise ValueError("draft model: expected one loaded for the engine's mesh, got one on other devices")

    def allocate(self, sizes: ProposerSizes) -> Caches:
        """Makes empty caches, with a page for each row of the target's cache group and head that keeps the most."""
        group, _ = sizes.lane
        return self._model.allocate_caches(sizes.groups[group].num_rows, sizes.page_size)

    def propose(
        self, weights: Any, state: Caches, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Caches]:
        """Decodes ahead."""
        drafts: list[Array] = []
        decode = jax.jit(self._decode)  # so that all steps but the first are lowered once
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
        """Computes the tokens that `propose` does not: those of prompts, and all where there were no drafts."""
        metadata = in_lane(step.metadata, step.lane)
        if metadata.num_decode and not step.num_drafts:
            _, state = self._newest(weights, state, step.rows)
        tokens = step.tokens[metadata.num_decode :]
        if not tokens.shape[0]:
            return state
        metadata = dataclasses.replace(_without_decode_rows(metadata), logit_rows=jnp.zeros(1, jnp.int32))
        return self._decode(weights, tokens, state, metadata)[1]

    def _newest(self, weights: Any, caches: Caches, rows: DraftRows) -> tuple[Array, Caches]:
        """Computes the newest token of each row, and again the one before it: if all drafts of the last step were
        accepted, that was the last of them, which has been no step's input yet."""
        tokens = jnp.stack([rows.written_at(rows.lens - 2), rows.tokens], axis=1).reshape(-1)
        return self._decode(weights, tokens, caches, in_lane(rows.decode_step(queries=2), rows.lane))

    def _decode(
        self, weights: Any, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Array, Caches]:
        return self._step(weights, tokens, caches, metadata)


def in_lane(metadata: StepMetadata, lane: tuple[int, int]) -> StepMetadata:
    """Metadata for caches whose pages are the rows of one head of one of the target's cache groups."""
    group, head = lane

    def of_head(array: Array, rank: int) -> Array:
        return array if array.ndim == rank else array[:, head]

    given = metadata.groups[group]
    tables = GroupTables(
        of_head(given.slots, 1), of_head(given.decode_block_tables, 2), of_head(given.prefill_block_tables, 2)
    )
    return dataclasses.replace(metadata, groups=(tables,))


def _without_decode_rows(metadata: StepMetadata) -> StepMetadata:
    """The prefill part of a step."""
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
