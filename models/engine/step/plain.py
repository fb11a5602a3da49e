"""The function of a step without drafts, which the runner compiles for each bucket (padded batch shape).

The inputs of decode rows are the tokens that the previous steps sampled, which stay on the device. The inputs of
prefill rows are prompt tokens from the host. A request slot is the index of a running request. Idle rows (padding), and
prefill rows whose prompt continues in a later step, have no request slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_attn.models.decoder import Caches
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.logit_edits import EditRows, EditState, make_edit
from pallas_attn.models.engine.logprobs import pack_logprobs, pack_prompt_logprobs
from pallas_attn.models.engine.request import RowFlags
from pallas_attn.models.engine.sampler import draw
from pallas_attn.models.engine.step.packed import PackedStep

type LogitsOf = Callable[[Any, Float[Array, "n D"]], Float[Array, "n V"]]
"""Function from the model's weights and hidden states after the final norm to logits."""


def run_step(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: Sequence[Array],
    caches: Caches,
    last_tokens: Int32[Array, "slots"],
    packed: Int32[Array, "n"],
    edits: EditState,
    masks: UInt32[Array, "rows W"],
    *,
    logits_of: LogitsOf | None = None,
) -> tuple[
    Int32[Array, "rows"],
    Int32[Array, "m words"],
    Float[Array, "tokens V"] | None,
    Caches,
    Int32[Array, "slots"],
    EditState,
]:
    """Run one step on the device.

    Args:
      model_step: the model as a function (weights, tokens, caches, metadata) -> (logits, caches), from `split_model`.
      config: sizes for which the runner compiles.
      bucket: padded shape of the step.
      weights: the model's weights.
      caches: caches of all layers.
      last_tokens: int32 [request slots], the last sampled token of each running request.
      packed: the step's metadata, from `PackedStep.pack`.
      edits: state of the request slots.
      masks: bit masks of allowed tokens of each row; ignored for rows without a token filter.
      logits_of: function from the model's weights and hidden states to logits, for log probabilities of prompt tokens.
        None to compute none.

    Returns:
      Sampled tokens int32 [rows], of the bucket's decode rows, then of its prefill rows; log probabilities of these
      tokens, then (with `logits_of`) of the token after each prefill token, as `pack_logprobs`; logits of the prefill
      tokens, or None if `bucket.all_logits` is False; caches with the new tokens; and new `last_tokens` and `edits`.
    """
    step, tokens, sampling, logit_rows = read_step(config, bucket, packed, last_tokens)
    scores = logits_of is not None and bucket.prefill_tokens > 0
    extra = {"return_hidden": True} if scores else {}
    logits, caches, *hidden = model_step(weights, tokens, caches, step.metadata(config.page_size, logit_rows), **extra)
    results = sample_rows(config, bucket, step, logits, sampling, last_tokens, edits, masks)
    chosen, logprobs, prompt_logits, last_tokens, edits = results
    if logits_of is not None and scores:
        of_prompt = functools.partial(logits_of, weights)
        logprobs = with_prompt_logprobs(config, step, logprobs, hidden[0][bucket.decode_rows :], of_prompt)
    return chosen, logprobs, prompt_logits, caches, last_tokens, edits


def read_step(
    config: RunnerConfig, bucket: Bucket, packed: Int32[Array, "n"], last_tokens: Int32[Array, "slots"]
) -> tuple[PackedStep, Int32[Array, "T"], Int32[Array, "rows"], Int32[Array, "n"]]:
    """Unpack a step's metadata and gather its input tokens.

    Returns:
      The metadata; the input tokens [T]; for each row, the index of the input token after which a token is sampled; and
      the indices of the input tokens for which logits are computed.
    """
    step = PackedStep.of(config, bucket, packed)
    decode_ids = last_tokens[jnp.maximum(step.decode_request_slots, 0)]
    tokens = jnp.concatenate([decode_ids, step.prefill_ids])
    decode_rows = jnp.arange(bucket.decode_rows, dtype=jnp.int32)
    prefill_ends = bucket.decode_rows + jnp.maximum(step.cu_q_lens[1:] - 1, 0)
    sampling = jnp.concatenate([decode_rows, prefill_ends])
    logit_rows = jnp.arange(tokens.shape[0], dtype=jnp.int32) if bucket.all_logits else sampling
    return step, tokens, sampling, logit_rows


def sample_rows(
    config: RunnerConfig,
    bucket: Bucket,
    step: PackedStep,
    logits: Float[Array, "n V"],
    sampling: Int32[Array, "rows"],
    last_tokens: Int32[Array, "slots"],
    edits: EditState,
    masks: UInt32[Array, "rows W"],
) -> tuple[
    Int32[Array, "rows"],
    Int32[Array, "rows words"],
    Float[Array, "tokens V"] | None,
    Int32[Array, "slots"],
    EditState,
]:
    """Sample a token for each row from the logits of a step.

    Args:
      config, bucket: as in `run_step`.
      step: metadata of the step, from `read_step`.
      logits: result of the model: logits of all input tokens if `bucket.all_logits`, else of the tokens `sampling`.
      sampling: index of the input token after which a token is sampled, for each row, from `read_step`.
      last_tokens: int32 [request slots], the last sampled token of each running request.
      edits, masks: as in `run_step`.

    Returns:
      Sampled tokens; their log probabilities; logits of the prefill tokens, or None if `bucket.all_logits` is False;
      `last_tokens` with the sampled tokens of rows that have a request slot; and `edits`, which counts these tokens.
    """
    of_rows = logits[sampling] if bucket.all_logits else logits
    rows, sampled = step.edit_rows(config, masks), step.sampling_rows()
    chosen = draw(of_rows, sampled, make_edit(rows, sampled.position, edits, config.logits_processor))
    logprobs = logprobs_of_rows(config, rows, of_rows, chosen)
    slots = jnp.where(rows.slots < 0, last_tokens.shape[0], rows.slots)  # .at would count -1 from the end
    # NONFINITE (-1) ends its request when the host reads it. Steps launched until then use this token as an input,
    # which must be a valid token id.
    last_tokens = last_tokens.at[slots].set(jnp.maximum(chosen, 0), mode="drop")
    prompt_logits = logits[bucket.decode_rows :] if bucket.all_logits else None
    return chosen, logprobs, prompt_logits, last_tokens, edits.with_sampled(rows, chosen)


def logprobs_of_rows(
    config: RunnerConfig, rows: EditRows, logits: Float[Array, "n V"], tokens: Int32[Array, "n"]
) -> Int32[Array, "n words"]:
    """Return the log probabilities of sampled tokens if a row requests them, else 0; see `pack_logprobs`."""
    is_used = jnp.any(rows.flags & RowFlags.LOGPROBS != 0)
    return pack_logprobs(logits, tokens, config.max_logprobs, is_used)


def with_prompt_logprobs(
    config: RunnerConfig,
    step: PackedStep,
    logprobs: Int32[Array, "n words"],
    hidden: Float[Array, "T D"],
    logits_of: Callable[[Float[Array, "c D"]], Float[Array, "c V"]],
) -> Int32[Array, "m words"]:
    """Append the log probability of the token after each prefill token, with the hidden states of the prefill tokens.
    They are 0 if no data rank needs them."""
    is_used = step.wants_prompt_logprobs[0] == 1
    of_prompt = pack_prompt_logprobs(logits_of, hidden, step.next_prompt_tokens(), config.max_logprobs, is_used)
    return jnp.concatenate([logprobs, of_prompt])
