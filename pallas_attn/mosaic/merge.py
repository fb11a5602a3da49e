"""The merge of partial attention states: the arithmetic and the loop that all Mosaic kernels use.

Terms:

    query row        one query head of one query token
    attention state  attention of query rows to some of their keys, not normalised: (m, l, acc)
    split            a range of the keys of a query row that one CTA attends to
    partial state    the attention state of one split, in global memory

An attention state has these float32 values for each query row:

    m     largest score, or another reference that is close to it; -inf if the row sees no key
    l     sum of exp(score - m)
    acc   sum of values times exp(score - m)

Loop of a merge kernel, for each block of query rows (and slice of output columns) that its CTA handles:

    merged = empty                                           # m = -inf, l = 0, acc = 0
    for each split, in order: merged = merge(merged, partial state)      # merge_in_order
    out, lse = acc / l, m + log(l)                           # StateForm.output, StateForm.lse

The kernels differ in how they load a partial state and in how they write the output:

    decode_merge           paged decode, and latent decode with few query rows; states through shared memory (TMA)
    hopper.mla_rows        latent decode with many query rows, sparse latent attention; states through shared memory
    blackwell.mla_merge    latent decode; each thread loads its values from global memory
    prefill.split          prefill; each thread loads its values from global memory

A partial state stores m and l separately instead of the LSE m + log(l), which would not be accurate enough. Rounding an
LSE of 5e5 to float32 changes it by up to 1/64, and so the weight of the split by 1.6%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.mosaic.primitives import register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E


class AttentionState(NamedTuple):
    """Attention of a block of query rows to some of their keys; see the module's docstring.

    Attributes:
      m, l: float32 [query_rows].
      acc: float32 [query_rows, values] or [values, query_rows], see `StateForm`.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any


@dataclasses.dataclass(frozen=True)
class StateForm:
    """Form of a kernel's attention states, and the arithmetic of states in this form.

    Attributes:
      query_axis: axis of the query rows in `acc`.
      log2: whether `m` and scores are multiplied by log2(e), so that a weight is 2**(score - m) instead of
        exp(score - m).
    """

    query_axis: int
    log2: bool

    def spread(self, per_query_row: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast one value per query row to `shape`, the shape of an accumulator or of a slice of it."""
        return lax.broadcast_in_dim(per_query_row, shape, [self.query_axis])

    def empty(self, shape: tuple[int, int], per_query_row: Any, tile: Any) -> AttentionState:
        """Return the state of query rows that have seen no keys.

        Args:
          shape: shape of `acc`.
          per_query_row: register layout of `m` and `l`.
          tile: register layout of `acc`.
        """
        rows = (shape[self.query_axis],)
        return AttentionState(
            register_tiles.filled(-jnp.inf, rows, per_query_row),
            register_tiles.filled(0.0, rows, per_query_row),
            register_tiles.filled(0.0, shape, tile),
        )

    def merge(self, state: AttentionState, other: AttentionState) -> AttentionState:
        """Merge two states over different keys of the same query rows."""
        m = jnp.maximum(state.m, other.m)
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        weights = [self._exp(x.m - shift) for x in (state, other)]
        mine, others = (self.spread(weight, state.acc.shape) for weight in weights)
        return AttentionState(m, state.l * weights[0] + other.l * weights[1], state.acc * mine + other.acc * others)

    def output(self, state: AttentionState, sink: Any = None) -> Any:
        """Return the attention output, `acc` divided by the softmax denominator; 0 for query rows that see no key.

        Args:
          sink: see `inverse`.
        """
        return self.normalise(state.acc, state.l, self.inverse(state.m, state.l, sink))

    def inverse(self, m: Any, l: Any, sink: Any = None) -> Any:  # noqa: E741
        """Return 1 / (l + w), where w is the weight of the sink relative to m, or 1 / l without sinks; 0 for query rows
        that see no key.

        Args:
          m: references of the state; may be None without sinks.
          l: sums of the state.
          sink: learned logit of each query row, in natural units also if the state has units of log2; or None.
        """
        seen, denominator = l != 0, l
        if sink is not None:
            shift = jnp.where(seen, m, 0.0)
            denominator = l + jnp.exp2(sink * LOG2E - shift if self.log2 else (sink - shift) * LOG2E)
        return jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)

    def normalise(self, acc: Any, l: Any, inverse: Any = None) -> Any:  # noqa: E741
        """Return acc · inverse; 0 for query rows that see no key, whose `acc` may hold NaN (0 times an infinite value).

        Args:
          acc: an accumulator or a slice of an accumulator.
          inverse: from `inverse`; None for 1 / l.
        """
        inverse = self.inverse(None, l) if inverse is None else inverse
        seen = self.spread(l != 0, acc.shape)
        return jnp.where(seen, acc * self.spread(inverse, acc.shape), 0.0)

    def lse(self, m: Any, l: Any) -> Any:  # noqa: E741
        """Return the natural-log LSE without sinks; -inf for query rows that see no key."""
        seen = l != 0
        log2_sum = jnp.log2(jnp.where(seen, l, 1.0))
        return jnp.where(seen, (m + log2_sum) * (1 / LOG2E) if self.log2 else m + log2_sum * (1 / LOG2E), -jnp.inf)

    def _exp(self, x: Any) -> Any:
        """Return the weight of a score that is x above the reference: exp(x), or 2**x with `log2`."""
        return jnp.exp2(x if self.log2 else x * LOG2E)


def merge_in_order(
    form: StateForm, load: Callable[[Any], AttentionState], first: Any, stop: Any, merged: AttentionState
) -> AttentionState:
    """Merge the partial states load(first) to load(stop - 1) into a state, one after the other.

    The order is always the order of the splits. So rounding does not depend on which CTA computed a split, or when.
    """
    return lax.fori_loop(first, stop, lambda i, merged: form.merge(merged, load(i)), merged)
