"""Acceptance of drafts: compares the drafts of a step with the tokens that the target samples at their positions.

Each of the Bd decode rows has Q = 1 + d inputs: input 0 is the newest token, and input j + 1 is draft j. A draft is
accepted if it equals the token sampled after the input that it follows, and if that input is accepted or input 0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_attn.models.engine.speculation.proposer import DraftTree

NOTHING = -2
"""Entry of an array of tokens that stands for no token: padding after the last token of a row, or no sampled token."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """Result of verification for the Bd decode rows of a step. Each row has Q = 1 + d inputs: input 0 is the newest
    token, and input j + 1 is draft j.

    Attributes:
      tokens: int32 [Bd, Q], new tokens of each row: the tokens sampled after input 0 and after each accepted draft, in
        order; then NOTHING.
      accepted: int32 [Bd], number of accepted drafts.
      lens: int32 [Bd], number of tokens of each sequence with the new tokens; 0 for idle rows.
      last: int32 [Bd], index of the input that is the last accepted draft; 0 if no draft is accepted.
      next_tokens: int32 [Bd, Q], token sampled after each input, if the input is 0 or an accepted draft; else NOTHING.
      inputs: int32 [Bd, Q], index of the input after which each of `tokens` was sampled.
    """

    tokens: Int32[Array, "Bd Q"]
    accepted: Int32[Array, "Bd"]
    lens: Int32[Array, "Bd"]
    last: Int32[Array, "Bd"]
    next_tokens: Int32[Array, "Bd Q"]
    inputs: Int32[Array, "Bd Q"]


def verify(
    chosen: Int32[Array, "Bd Q"],
    drafts: Int32[Array, "Bd d"],
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
) -> Verified:
    """Compare drafts in a line with the tokens sampled after each input (`chosen`). `lens` is 0 for idle rows."""
    accepted = accept(chosen, drafts, num_drafts)
    query = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None]
    is_got = (query <= accepted[:, None]) & (lens > 0)[:, None]
    tokens = jnp.where(is_got, chosen, NOTHING)
    inputs = jnp.broadcast_to(query, tokens.shape)
    return Verified(tokens, accepted, jnp.where(lens > 0, lens + accepted + 1, 0), accepted, tokens, inputs)


def verify_tree(
    chosen: Int32[Array, "Bd Q"],
    tree: DraftTree,
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
    depth: int,
) -> Verified:
    """Compare the drafts of a tree with the tokens sampled after each input (`chosen`). `depth` is the length of the
    longest branch; `lens` is 0 for idle rows."""
    branch, accepted = accept_branch(chosen, tree.tokens, tree.parents + 1, num_drafts, depth)
    got = first(chosen, jnp.where(lens > 0, accepted + 1, 0))
    tokens = jnp.where(got, jnp.take_along_axis(chosen, branch, axis=1), NOTHING)
    query = jnp.arange(chosen.shape[1], dtype=jnp.int32)
    on_branch = jnp.any(got[:, :, None] & (branch[:, :, None] == query[None, None]), axis=1)
    return Verified(
        tokens,
        accepted,
        lens=jnp.where(lens > 0, lens + accepted + 1, 0),
        last=branch[:, -1],
        next_tokens=jnp.where(on_branch, chosen, NOTHING),
        inputs=branch,
    )


def accept(
    chosen: Int32[Array, "B Q"], drafts: Int32[Array, "B d"], num_drafts: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Return the number of accepted drafts of each row: leading drafts that equal the tokens sampled at their
    positions.

    Args:
      chosen: tokens sampled after the newest token and after each draft, Q = 1 + d.
      drafts: drafts in a line.
      num_drafts: number of drafts of each row.
    """
    return jnp.minimum(leading(chosen[:, :-1] == drafts), num_drafts)


def accept_branch(
    chosen: Int32[Array, "B Q"],
    drafts: Int32[Array, "B d"],
    parents: Int32[Array, "B d"],
    num_drafts: Int32[Array, "B"],
    depth: int,
) -> tuple[Int32[Array, "B Q"], Int32[Array, "B"]]:
    """Find the accepted branch of each row's tree: the drafts on it equal the tokens sampled at their positions.

    Input 0 is the newest token, and input j + 1 is draft j.

    Args:
      chosen: tokens sampled after each input, Q = 1 + d.
      drafts: drafts of the tree.
      parents: index of the input that each draft follows.
      num_drafts: number of drafts of each row.
      depth: number of drafts of the longest branch.

    Returns:
      Indices of the inputs along the branch, starting with 0, and repeating the last input up to Q entries; and the
      number of drafts on the branch.
    """
    rows, index = jnp.arange(chosen.shape[0], dtype=jnp.int32), jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    given = index < num_drafts[:, None]
    branch = [jnp.zeros_like(num_drafts)]
    accepted = jnp.zeros_like(num_drafts)
    for _ in range(depth):
        at = branch[-1]
        follows = given & (parents == at[:, None]) & (drafts == chosen[rows, at][:, None])
        found = jnp.any(follows, axis=1)
        branch.append(jnp.where(found, jnp.argmax(follows, axis=1).astype(jnp.int32) + 1, at))
        accepted += found.astype(jnp.int32)
    branch += [branch[-1]] * (drafts.shape[1] - depth)
    return jnp.stack(branch, axis=1), accepted


def leading(holds: Bool[Array, "B d"]) -> Int32[Array, "B"]:
    """Return the number of leading True entries of each row."""
    index = jnp.arange(holds.shape[1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where(holds, holds.shape[1], index), axis=1, initial=holds.shape[1])


def first(x: Array, counts: Int32[Array, "B"]) -> Bool[Array, "B n"]:
    """Return a mask [B, n] of the first `counts[b]` entries of row b, with n = x.shape[1]."""
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None] < counts[:, None]
