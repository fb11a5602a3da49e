"""Proposer of drafts (guesses of the next tokens) with a smaller model of the same vocabulary.

The target is the engine's model, which verifies the drafts. A cache group is a set of layers of the target with equal
attention windows. If the KV heads of a group have different windows, their pages are allocated separately: a page row
is one page of one head. Otherwise a page row is one page of all heads. A cache slot is the index of a token's place in
the cache: page row · page size + offset.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_attn.models.config import HeadWindows, ModelConfig, cache_groups
from pallas_attn.models.decoder import Caches, Decoder, GroupTables, StepMetadata, named_weights, shapes_of, split_model
from pallas_attn.models.decoder.mesh import bytes_on_device
from pallas_attn.models.engine.sampler import draw
from pallas_attn.models.engine.speculation.proposer import DraftRows, ObservedStep, Proposer, ProposerSizes


class DraftModelProposer(Proposer):
    """Proposes drafts by decoding with another model, one token per row at a time.

    Drafts are sampled with the request's sampling parameters and with the random numbers of the target's draw at the
    same position. If both distributions are similar, draft and target therefore mostly agree.

    The draft model has its own caches, with the pages and block tables of the target. It computes the same prompt
    tokens in the same steps as the target. Therefore a prefix found in the prefix cache is also in the draft model's
    cache. In steps without drafts it computes the newest token of each row as well, so that its cache stays complete.

    Raises:
      NotImplementedError: the KV heads of a layer of the draft model have different windows.
    """

    def __init__(self, model: Decoder):
        """Use the model's weights without a copy."""
        if any(isinstance(group.window, HeadWindows) for group in cache_groups(model.config)):
            raise NotImplementedError("draft model: expected heads with equal windows, got windows per head")
        self._model = shapes_of(model)
        self._step, self.weights = split_model(model)
        self.weight_names = tuple(named_weights(model))
        self.draft_bytes = sum(map(bytes_on_device, self.weights))

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raise ValueError unless both models have the same vocabulary size and mesh."""
        wanted, got = target.vocab_size, self._model.config.vocab_size
        if got != wanted:
            raise ValueError(f"draft model: expected the target's vocabulary of {wanted} tokens, got {got}")
        if self._model.mesh != sizes.mesh:
            raise ValueError("draft model: expected one loaded for the engine's mesh, got one on other devices")

    def allocate(self, sizes: ProposerSizes) -> Caches:
        """Allocate empty caches with one page for each page row of the cache group in `sizes.lane` (the group with the
        longest window). Therefore the draft model can use the block tables of one head of this group. The dtype is the
        draft model's, also if the target's caches are quantised."""
        group, _ = sizes.lane
        return self._model.allocate_caches(sizes.groups[group].num_rows, sizes.page_size)

    def propose(
        self, weights: Any, state: Caches, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"], Caches]:
        """Decode `num_drafts` tokens per row."""
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
        """Compute the cache entries that `propose` has not computed in this step: the entries of prompt tokens, and, in
        a step without drafts, the entries of the newest tokens of decode rows."""
        metadata = in_lane(step.metadata, step.lane)
        if metadata.num_decode and not step.num_drafts:
            _, state = self._newest(weights, state, step.rows)
        tokens = step.tokens[metadata.num_decode :]
        if not tokens.shape[0]:
            return state
        metadata = dataclasses.replace(_without_decode_rows(metadata), logit_rows=jnp.zeros(1, jnp.int32))
        return self._decode(weights, tokens, state, metadata)[1]

    def _newest(self, weights: Any, caches: Caches, rows: DraftRows) -> tuple[Array, Caches]:
        """Run the draft model on the newest token of each row and the token before it, and write their cache entries.
        The entry of the token before may be missing: if the last step accepted all drafts, this token is the last
        draft, which was never an input of the draft model.

        Returns:
          Logits of the newest tokens, and the caches.
        """
        tokens = jnp.stack([rows.written_at(rows.lens - 2), rows.tokens], axis=1).reshape(-1)
        return self._decode(weights, tokens, caches, in_lane(rows.decode_step(queries=2), rows.lane))

    def _decode(
        self, weights: Any, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Array, Caches]:
        return self._step(weights, tokens, caches, metadata)


def in_lane(metadata: StepMetadata, lane: tuple[int, int]) -> StepMetadata:
    """Convert metadata of a step of the target to metadata for the draft model, which has a single cache group.

    The result has the block tables and cache slots of one head of the target. The draft model's cache has one page for
    each page row of this head's cache group, so the indices of page rows are page ids of the draft model.

    Args:
      metadata: metadata of a step of the target.
      lane: indices (cache group, head) of the head, from `ProposerSizes.lane`.
    """
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
