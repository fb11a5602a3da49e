"""Changes of logits by sampling parameters, before the temperature is applied. All changes run on the device.

The changes are applied in the order of vLLM's sampler:

1. Token masks (`TokenFilter`) and `allowed_token_ids`: the logits of all other tokens become -inf.
2. `min_tokens`: the logits of stop tokens become -inf, as long as the output is too short.
3. `logit_bias` is added.
4. The logits processor of `EngineConfig`.
5. `repetition_penalty`, then `frequency_penalty` and `presence_penalty`.

A request slot is the index of a running request in device arrays. Each request slot has a state (`EditState`): the
number of occurrences of each token, and the tokens that `allowed_token_ids`, `min_tokens` and `logit_bias` name. Masks
of token filters are not part of it; the host sends them with each step. The host writes the state (`write_slot`) of a
request that needs it in the step that computes the last tokens of its prefill, also after a preemption. The slots of
other requests keep old values, which `RowFlags` disable. Later steps count the tokens that they sample on the device,
because the host does not know these tokens when it launches the next step.

Without a logits processor, rows that use no parameter keep their logits bit for bit, also next to rows that do.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_attn.models.engine.request import MAX_EDITED_TOKENS, Request, RowFlags
from pallas_attn.models.engine.sampler import LogitEdit

WRITE_TOKENS = 4096
"""Number of tokens of a request that one call of `write_slot` counts. The state of a request with more tokens is
written by several calls."""

_EDITS = RowFlags.PENALTIES | RowFlags.TOKENS | RowFlags.ONLY_TOKENS | RowFlags.MASK


@dataclasses.dataclass(frozen=True)
class LogitsProcessor:
    """A function of the user that changes the logits of every sampled token, for `EngineConfig.logits_processor`.

    The function is traced into every step, so it must be a JAX function without side effects. It gets the logits of all
    rows of a step, with -inf for tokens that masks, `allowed_token_ids` and `min_tokens` exclude, before penalties and
    temperature are applied. A row must not depend on other rows. Logits of -inf exclude tokens. If a row becomes NaN or
    excludes all tokens, its request ends with the finish reason "nonfinite".

    Attributes:
      function: function (logits, extra) -> logits, with float32 logits [n, V] and a float32 array [n] per name.
      defaults: names that requests may set in `SamplingParams.extra_args`, with the values for requests that do not
        set them.

    Raises:
      ValueError: `function` is not callable, or `defaults` is not a mapping from names to numbers.

    Example:
      >>> def sharpen(logits, extra):  # float32 [n, V], {"power": float32 [n]}
      ...     return logits * extra["power"][:, None]
      >>> config = EngineConfig(logits_processor=LogitsProcessor(sharpen, {"power": 1.0}))
      >>> params = SamplingParams(temperature=1.0, extra_args={"power": 2.0})
    """

    function: Callable[[Float[Array, "n V"], dict[str, Float[Array, "n"]]], Float[Array, "n V"]]
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a function (logits, extra) -> logits, got {self.function!r}")
        if not isinstance(self.defaults, Mapping) or not all(
            isinstance(name, str) and isinstance(value, int | float) and np.isfinite(value)
            for name, value in self.defaults.items()
        ):
            raise ValueError(f"defaults: expected a mapping from names to finite numbers, got {self.defaults!r}")

    def values(self, given: Mapping[str, float]) -> list[float]:
        """Return the value of each name in the order of `defaults`, for a request with the `extra_args` `given`."""
        return [given.get(name, default) for name, default in self.defaults.items()]


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EditState:
    """State of each request slot on the device. K is `MAX_EDITED_TOKENS`.

    Attributes:
      counts: int32 [request slots, V], twice the number of occurrences of each token in the output, plus 1 if the token
        is in the prompt.
      ids: int32 [request slots, K], ids of the edited tokens, all different; V for unused entries.
      values: float32 [request slots, K], numbers that are added to the logits of these tokens.
      until: int32 [request slots, K]. The token is excluded from positions before this one.
    """

    counts: Int32[Array, "slots V"]
    ids: Int32[Array, "slots K"]
    values: Float[Array, "slots K"]
    until: Int32[Array, "slots K"]

    @staticmethod
    def allocate(num_slots: int, vocab_size: int) -> EditState:
        """Allocate the state that the first step gets."""
        ids = jnp.full((num_slots, MAX_EDITED_TOKENS), vocab_size, jnp.int32)
        counts, values = jnp.zeros((num_slots, vocab_size), jnp.int32), jnp.zeros(ids.shape, jnp.float32)
        return EditState(counts, ids, values, jnp.zeros_like(ids))

    def with_sampled(self, rows: EditRows, tokens: Int32[Array, "n"]) -> EditState:
        """Count the sampled tokens of rows with penalties. Negative tokens are ignored."""
        counted = (rows.slots >= 0) & (tokens >= 0) & (rows.flags & RowFlags.PENALTIES != 0)
        slots = jnp.where(counted, rows.slots, self.counts.shape[0])
        counts = self.counts.at[slots, jnp.maximum(tokens, 0)].add(2, mode="drop")
        return dataclasses.replace(self, counts=counts)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EditRows:
    """Parameters of n rows of logits.

    Attributes:
      slots: int32 [n], request slot; -1 for idle rows.
      flags: int32 [n], see `RowFlags`.
      repetition_penalty, presence_penalty, frequency_penalty: float32 [n], ignored without `RowFlags.PENALTIES`.
      extra: arguments of the logits processor, float32 [n] by name.
      masks: uint32 [n, ceil(V / 32)], bit masks of allowed tokens, ignored without `RowFlags.MASK`.
    """

    slots: Int32[Array, "n"]
    flags: Int32[Array, "n"]
    repetition_penalty: Float[Array, "n"]
    presence_penalty: Float[Array, "n"]
    frequency_penalty: Float[Array, "n"]
    extra: dict[str, Float[Array, "n"]]
    masks: UInt32[Array, "n W"]


class DraftsBefore(typing.NamedTuple):
    """Drafts that precede the logits of decode rows with drafts, which penalties count. A row has Q = 1 + d inputs:
    input 0 is the newest token, and input j + 1 is draft j. The first B · Q rows of logits belong to these inputs.

    Attributes:
      tokens: int32 [B, d], the drafts.
      reach: bool [B, Q, Q], whether input j is input i or precedes it.
    """

    tokens: Int32[Array, "B d"]
    reach: Bool[Array, "B Q Q"]


def make_edit(
    rows: EditRows,
    positions: Int32[Array, "n"],
    state: EditState,
    processor: LogitsProcessor | None = None,
    drafts: DraftsBefore | None = None,
) -> LogitEdit:
    """Make the change of the logits of a step.

    Args:
      rows: parameters of the rows of logits.
      positions: position of the new token of each row in its sequence.
      state: state of the request slots.
      processor: the logits processor. All rows are then always changed.
      drafts: drafts of decode rows; None without drafts.
    """
    is_used = None if processor is not None else jnp.any(rows.flags & _EDITS != 0)

    def edit(logits: Float[Array, "n V"]) -> Float[Array, "n V"]:
        logits = _with_tokens(_masked(logits, rows), rows, positions, state)
        if processor is not None:
            logits = _processed(processor, logits, rows.extra)
        return _penalised(logits, rows, state, drafts)

    return LogitEdit(edit, is_used)


def _masked(logits: Float[Array, "n V"], rows: EditRows) -> Float[Array, "n V"]:
    """Exclude the tokens whose bit in the row's mask is 0."""
    bit = jnp.arange(32, dtype=jnp.uint32)[None, None]
    bits = (rows.masks[:, :, None] >> bit) & 1  # [n, W, 32]
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | (rows.flags & RowFlags.MASK == 0)[:, None], logits, -jnp.inf)


def _with_tokens(
    logits: Float[Array, "n V"], rows: EditRows, positions: Int32[Array, "n"], state: EditState
) -> Float[Array, "n V"]:
    """Change the logits of the edited tokens of each row. With `RowFlags.ONLY_TOKENS`, exclude all other tokens."""
    slots, row = jnp.maximum(rows.slots, 0), jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    ids = jnp.where((rows.flags & RowFlags.TOKENS != 0)[:, None], state.ids[slots], logits.shape[1])  # [n, K]
    old = jnp.take_along_axis(logits, jnp.minimum(ids, logits.shape[1] - 1), axis=1)
    new = jnp.where(positions[:, None] < state.until[slots], -jnp.inf, old + state.values[slots])
    others = jnp.where((rows.flags & RowFlags.ONLY_TOKENS != 0)[:, None], -jnp.inf, logits)
    return others.at[row, ids].set(new, mode="drop")


def _processed(
    processor: LogitsProcessor, logits: Float[Array, "n V"], extra: dict[str, Float[Array, "n"]]
) -> Float[Array, "n V"]:
    """Call the logits processor and check its result."""
    result = processor.function(logits, extra)
    if getattr(result, "shape", None) != logits.shape or result.dtype != logits.dtype:
        got = f"{result.dtype.name} {list(result.shape)}" if isinstance(result, jax.Array) else repr(result)
        raise ValueError(f"logits_processor: expected {logits.dtype.name} {list(logits.shape)}, got {got}")
    return result


def _penalised(
    logits: Float[Array, "n V"], rows: EditRows, state: EditState, drafts: DraftsBefore | None
) -> Float[Array, "n V"]:
    """Apply the penalties for tokens that occur in the prompt, in the output, or in drafts that precede the row."""
    slots = jnp.maximum(rows.slots, 0)
    of_rows = tuple(
        values[:, None]
        for values in (rows.flags, rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
    )
    penalised = _penalise(logits, state.counts[slots], *of_rows)
    if drafts is None or not drafts.tokens.size:
        return penalised
    # Compute the logits of draft tokens again, with the drafts in the counts. Counts of all tokens with drafts would
    # take another array [n, V].
    batch, queries, _ = drafts.reach.shape
    row = jnp.arange(batch * queries, dtype=jnp.int32).reshape(batch, queries, 1)
    before = drafts.reach[:, :, 1:]  # [B, Q, d]
    equal = drafts.tokens[:, :, None] == drafts.tokens[:, None]  # [B, d, d]
    times = jnp.sum(before[:, :, None] & equal[:, None], axis=-1, dtype=jnp.int32)  # [B, Q, d]
    token = jnp.broadcast_to(jnp.minimum(drafts.tokens, logits.shape[1] - 1)[:, None], times.shape)
    counts = state.counts[slots[row], token] + 2 * times
    of_drafts = (values[: batch * queries].reshape(batch, queries, 1) for values in of_rows)
    again = _penalise(logits[row, token], counts, *of_drafts)
    return penalised.at[jnp.where(before, row, logits.shape[0]), token].set(again, mode="drop")


def _penalise(
    logits: Array, occurrences: Array, flags: Array, repetition: Array, presence: Array, frequency: Array
) -> Array:
    """Return penalised logits, given the entry of `EditState.counts` of each token and the parameters of its row."""
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = (occurrences >> 1).astype(jnp.float32)
    penalised = jnp.where(occurrences > 0, repeated, logits) - frequency * times
    penalised -= jnp.where(times > 0, presence, 0.0)
    return jnp.where(flags & RowFlags.PENALTIES != 0, penalised, logits)


# --- writes of the host


def write_size() -> int:
    """Number of entries of the packed argument of `write_slot`."""
    return 2 + 3 * MAX_EDITED_TOKENS + WRITE_TOKENS


def pack_writes(request: Request, slot: int, eos_token_ids: Sequence[int], vocab_size: int) -> list[np.ndarray]:
    """Return the arguments of consecutive calls of `write_slot`, int32 [write_size()] each, that write the state of a
    request slot.

    Args:
      request: the request. All its tokens are known to the host.
      slot: the request slot.
      eos_token_ids: end-of-sequence tokens of the model.
      vocab_size: V.
    """
    params, num_prompt = request.params, len(request.prompt_ids)
    tokens = np.zeros(0, np.int32)
    if params.has_penalties:
        tokens = 2 * np.asarray(request.token_ids, np.int32)
        tokens[num_prompt:] += 1
    header = np.zeros(2 + 3 * MAX_EDITED_TOKENS, np.int32)
    ids, values, until = header[2:].reshape(3, -1)
    edited = params.edited_tokens(eos_token_ids)
    ids[:] = vocab_size
    ids[: len(edited)] = edited
    values.view(np.float32)[: len(edited)] = [params.logit_bias.get(token, 0.0) for token in edited]
    if params.min_tokens:
        stops = {*params.stop_token_ids, *eos_token_ids}
        until[: len(edited)] = [(num_prompt + params.min_tokens) * (token in stops) for token in edited]
    header[0] = slot
    packed = []
    for begin in range(0, max(len(tokens), 1), WRITE_TOKENS):
        chunk = tokens[begin : begin + WRITE_TOKENS]
        header[1] = begin == 0
        packed.append(np.concatenate([header, chunk, np.full(WRITE_TOKENS - len(chunk), -1, np.int32)]))
    return packed


def write_slot(state: EditState, packed: Int32[Array, "n"]) -> EditState:
    """Write the state of one request slot.

    Args:
      state: the state, which is donated.
      packed: entry of `pack_writes`: request slot (negative to write nothing); 1 if the slot's old counts are dropped,
        else 0; ids, values and until as in `EditState`; and tokens to count, 2 · token id + (1 if the token is in the
        output), -1 for padding.
    """
    slot, is_first = packed[0], packed[1] == 1
    ids, values, until = packed[2 : 2 + 3 * MAX_EDITED_TOKENS].reshape(3, -1)
    tokens = packed[2 + 3 * MAX_EDITED_TOKENS :]
    num_slots, vocab_size = state.counts.shape
    old = jnp.where(is_first, 0, state.counts[jnp.maximum(slot, 0)])
    token = jnp.where(tokens >= 0, tokens >> 1, vocab_size)
    counts = old.at[token].add(jnp.where(tokens & 1 == 1, 2, 0), mode="drop")
    in_prompt = jnp.zeros_like(old).at[token].max((tokens & 1) ^ 1, mode="drop")
    index = jnp.where(slot < 0, num_slots, slot)

    def written(array: Array, row: Array) -> Array:
        return array.at[index].set(row, mode="drop")

    return EditState(
        counts=written(state.counts, counts | in_prompt),
        ids=written(state.ids, ids),
        values=written(state.values, lax.bitcast_convert_type(values, jnp.float32)),
        until=written(state.until, until),
    )
