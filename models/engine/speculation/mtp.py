"""Drafts by a checkpoint's multi-token prediction module."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from models.decoder import MTP, StepMetadata, split_module
from models.decoder.mesh import ExpertSplit, bytes_on_device
from models.decoder.mtp import MTPCaches
from models.engine.sampler import best
from models.engine.speculation.proposer import DraftRows, DraftTree, ObservedStep, Proposer, ProposerSizes
from pallas_attn import PAGE_NONE


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPState:
    """Memory of an `MTPProposer`.

    Attributes:
      caches: the module's, in the pages of the target's layers.
      hidden: [slots, D], by batch slot the module's hidden state before the newest token, from which the first draft
        follows.
    """

    caches: MTPCaches
    hidden: Float[Array, "slots D"]


class MTPProposer(Proposer):
    """Proposes tokens of the module that was trained with the model, applied to its own results for every draft but the
    first. They are chosen as the request's tokens are: the likeliest, or drawn, with the same noise that the model's
    draw in that place has, which makes the two agree the more often the more alike their distributions are.

    With several alternatives drafts are a tree: at each place that many of the likeliest, after the likeliest at the
    place before. So n drafts are n / alternatives places deep, and the module runs once a place.

    The module's cache is filled as the target's is, by every step and for every token that counts, so pages of a prefix
    that is found have it, too. A page's last entry knows the token that came next where the page was filled; where
    another comes next, the drafts after it may be a little worse.

    Raises:
      NotImplementedError: several modules.
      ValueError: alternatives out of range.
    """

    needs_hidden = True

    def __init__(self, mtp: MTP, alternatives: int = 1):
        """Uses the module's weights where they are.

        Args:
          mtp: of the engine's model.
          alternatives: drafts for each place, from 1 to 8.
        """
        if isinstance(alternatives, bool) or not isinstance(alternatives, int) or not 1 <= alternatives <= 8:
            raise ValueError(f"alternatives: expected an integer from 1 to 8, got {alternatives!r}")
        if len(mtp.depths) > 1:
            raise NotImplementedError(
                f"mtp: expected one module, as published checkpoints have, got {len(mtp.depths)}: the second would need"
                " the first one's hidden states of steps past"
            )
        self._mtp, self._alternatives, self.makes_trees = mtp, alternatives, alternatives > 1
        self._rebuild, self.weights = split_module(mtp)
        self.draft_bytes = _draft_bytes(mtp)

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raises ValueError unless the module is the model's own."""
        if target != self._mtp.config:
            raise ValueError("mtp: expected the module of the engine's model, got that of another configuration")
        if self._mtp.mesh != sizes.mesh:
            raise ValueError("mtp: expected the module of the engine's model, got that of a model on other devices")

    def allocate(self, sizes: ProposerSizes) -> MTPState:
        """Makes an empty cache."""
        caches = self._mtp.allocate_caches(sizes.groups[0].num_pages, sizes.page_size, sizes.cache_dtype)
        embedding = self._mtp.embed_tokens[...]
        return MTPState(caches, jnp.zeros((sizes.max_num_seqs, embedding.shape[1]), embedding.dtype))

    def depth(self, num_drafts: int) -> int:
        """Places that so many drafts are for."""
        return -(-num_drafts // self._alternatives)

    def propose(
        self, weights: Any, state: MTPState, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"] | DraftTree, MTPState]:
        """Chains the module; entries of drafts that are not accepted are overwritten once the truth is known."""
        hidden, caches = state.hidden[jnp.maximum(rows.slots, 0)], state.caches
        drafts = [self._choose(weights, hidden, rows, 0)]
        link = jax.jit(self._link)  # so that all links are lowered once
        for ahead in range(1, self.depth(num_drafts)):
            hidden, caches = link(weights, drafts[-1][:, 0], hidden, caches, rows.decode_step(ahead - 1))
            drafts.append(self._choose(weights, hidden, rows, ahead))
        tokens, state = jnp.concatenate(drafts, axis=1)[:, :num_drafts], MTPState(caches, state.hidden)
        if not self.makes_trees:
            return tokens, state
        place = jnp.arange(num_drafts, dtype=jnp.int32) // self._alternatives
        parents = jnp.where(place > 0, (place - 1) * self._alternatives, -1)
        return DraftTree(tokens, jnp.broadcast_to(parents, tokens.shape)), state

    def observe(self, weights: Any, state: MTPState, step: ObservedStep) -> MTPState:
        """Computes the entries of a step's tokens, from the target's hidden states and the tokens that follow."""
        if step.hidden is None:
            raise ValueError("hidden: expected the target's hidden states, got None")
        tables = step.metadata.of_group(0)
        slots = jnp.where(step.next_tokens >= 0, tables.slots, PAGE_NONE)
        metadata = dataclasses.replace(step.metadata, groups=(dataclasses.replace(tables, slots=slots),))
        hidden, caches = self._link(weights, step.next_tokens, step.hidden, state.caches, metadata)
        caches = cast(MTPCaches, step.moved(caches))
        row_slots = jnp.where(step.row_slots < 0, state.hidden.shape[0], step.row_slots)
        return MTPState(caches, state.hidden.at[row_slots].set(hidden[step.last], mode="drop"))

    def _link(
        self, weights: Any, next_tokens: Array, hidden: Array, caches: MTPCaches, metadata: StepMetadata
    ) -> tuple[Array, MTPCaches]:
        """Runs the module; padding, and what was no number, has negative tokens."""
        return self._rebuild(weights)(jnp.maximum(next_tokens, 0), hidden, caches, metadata)

    def _choose(
        self, weights: Any, hidden: Float[Array, "B D"], rows: DraftRows, ahead: int
    ) -> Int32[Array, "B alternatives"]:
        sampling = dataclasses.replace(rows.sampling, position=rows.sampling.position + ahead)
        return best(self._rebuild(weights).logits(hidden), sampling, self._alternatives)


def _draft_bytes(mtp: MTP) -> int:
    """Bytes of weights that a device reads for a draft: those of the module, but for its share of the experts that a
    token does not choose, and of the head."""
    config, (module,) = mtp.part, mtp.depths
    head = mtp.embed_tokens[...] if mtp.lm_head is None else mtp.lm_head.weight[...]
    unread = 0 if config.is_dense(config.num_hidden_layers) else config.n_routed_experts - config.num_experts_per_tok
    of_expert = 3 * config.hidden_size * config.moe_intermediate_size * head.dtype.itemsize
    read = sum(map(bytes_on_device, split_module(module)[1])) + bytes_on_device(head)
    return read - unread * of_expert // ExpertSplit.over(mtp.mesh).devices
