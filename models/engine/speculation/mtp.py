"""Proposer of drafts (guesses of the next tokens) with the multi-token prediction (MTP) module of a checkpoint.

The target is the engine's model, which verifies the drafts.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import PAGE_NONE
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import MTP, V4MTP, StepMetadata, named_weights, shapes_of, split_module
from pallas_attn.models.decoder.mesh import ExpertSplit, bytes_on_device
from pallas_attn.models.decoder.mtp import MTPCaches
from pallas_attn.models.engine.sampler import best
from pallas_attn.models.engine.speculation.proposer import DraftRows, DraftTree, ObservedStep, Proposer, ProposerSizes


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPState:
    """State of an `MTPProposer`.

    Attributes:
      caches: the module's caches. They have the same pages and block tables as the caches of the target.
      hidden: [request slots, D] (N · D columns for DeepSeek-V4), output of the module for the position before the
        newest token of each running request (a request slot is the index of a running request). The logits of the
        first draft are computed from it.
    """

    caches: MTPCaches
    hidden: Float[Array, "slots D"]


class MTPProposer(Proposer):
    """Proposes drafts with the MTP module that was trained with the model.

    The input of the module for a position is a hidden state of this position and the token at the next position. The
    draft after this token is chosen from the output. For the first draft, the hidden state is the target's. For each
    later draft, the hidden state is the module's previous output, and the token is the previous draft.

    Drafts are sampled with the request's sampling parameters and with the random numbers of the target's draw at the
    same position. If both distributions are similar, draft and target therefore mostly agree.

    With several alternatives the drafts form a tree: each position has `alternatives` drafts, which all follow the
    first draft of the previous position. n drafts cover n / alternatives positions, and the module runs once per
    position.

    Every step writes the module's cache entries of all accepted tokens. Therefore pages in the prefix cache include the
    module's entries. An entry depends on the next token. If two requests share a page and continue it differently, the
    module's entry of the last token in the page is wrong for one of them, which may make its drafts slightly worse.

    Raises:
      NotImplementedError: the checkpoint has several modules.
      ValueError: alternatives is out of range.
    """

    needs_hidden = True

    def __init__(self, mtp: MTP | V4MTP, alternatives: int = 1):
        """Use the module's weights without a copy.

        Args:
          mtp: MTP module of the engine's model.
          alternatives: number of drafts per position, from 1 to 8.
        """
        if isinstance(alternatives, bool) or not isinstance(alternatives, int) or not 1 <= alternatives <= 8:
            raise ValueError(f"alternatives: expected an integer from 1 to 8, got {alternatives!r}")
        if len(mtp.depths) > 1:
            raise NotImplementedError(
                f"mtp: expected one module, as in published checkpoints, got {len(mtp.depths)}; the second module would"
                " need hidden states of the first one from earlier steps"
            )
        self._mtp, self._alternatives, self.makes_trees = shapes_of(mtp), alternatives, alternatives > 1
        self._rebuild, self.weights = split_module(mtp)
        self.weight_names = tuple(named_weights(mtp))
        self.draft_bytes = _draft_bytes(mtp)

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raise ValueError unless the module belongs to the target model."""
        if target != self._mtp.config:
            raise ValueError("mtp: expected the module of the engine's model, got a module of another configuration")
        if self._mtp.mesh != sizes.mesh:
            raise ValueError("mtp: expected the module of the engine's model, got a module on another mesh")

    def allocate(self, sizes: ProposerSizes) -> MTPState:
        """Allocate empty caches and hidden states."""
        caches: Any = self._mtp.allocate_caches(sizes.groups[0].num_pages, sizes.page_size, sizes.cache_dtype)
        hidden = jnp.zeros((sizes.max_num_seqs, self._mtp.hidden_width), self._mtp.embed_tokens.dtype)
        return MTPState(caches, hidden)

    def depth(self, num_drafts: int) -> int:
        """Return the number of positions that `num_drafts` drafts cover: num_drafts / alternatives, rounded up."""
        return -(-num_drafts // self._alternatives)

    def propose(
        self, weights: Any, state: MTPState, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"] | DraftTree, MTPState]:
        """Choose the drafts of the first position from the hidden states that `observe` stored. For each later
        position, run the module on the first draft of the previous position. These runs write cache entries of the
        drafts, which `observe` overwrites later."""
        hidden, caches = state.hidden[jnp.maximum(rows.slots, 0)], state.caches
        drafts = [self._choose(weights, hidden, rows, 0)]
        link = jax.jit(self._link)  # all runs share one lowered function
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
        """Run the module on all tokens of a step, with the target's hidden states and the next tokens as input. This
        writes the module's cache entries. Store the output for the last token of each request, from which `propose`
        chooses the first draft of the request in its next step."""
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
        """Run the module and write its caches. Negative next tokens (padding, or NONFINITE) are replaced by token 0."""
        mtp: Any = self._rebuild(weights)
        return mtp(jnp.maximum(next_tokens, 0), hidden, caches, metadata)

    def _choose(
        self, weights: Any, hidden: Float[Array, "B D"], rows: DraftRows, ahead: int
    ) -> Int32[Array, "B alternatives"]:
        """Choose the drafts `ahead` positions after the first draft from the module's hidden state."""
        sampling = dataclasses.replace(rows.sampling, position=rows.sampling.position + ahead)
        return best(self._rebuild(weights).logits(hidden), sampling, self._alternatives)


def _draft_bytes(mtp: MTP | V4MTP) -> int:
    """Return the bytes of weights that a device reads to make one draft: the output head, and the module without the
    experts that a token does not select."""
    config, (module,) = mtp.part, mtp.depths
    head = mtp.embed_tokens[...] if mtp.lm_head is None else mtp.lm_head.weight[...]
    unread = 0 if config.is_dense(config.num_hidden_layers) else config.n_routed_experts - config.num_experts_per_tok
    of_expert = 3 * config.hidden_size * config.moe_intermediate_size * head.dtype.itemsize
    read = sum(map(bytes_on_device, split_module(module)[1])) + bytes_on_device(head)
    return read - unread * of_expert // ExpertSplit.over(mtp.mesh).devices
