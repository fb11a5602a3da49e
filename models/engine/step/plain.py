"""The function of a step without drafts, which the runner compiles for each bucket (padded batch shape).

The inputs of decode rows are the tokens that the previous steps sampled, which stay on the device. The inputs of
prefill rows are prompt tokens from the host. A request slot is the index of a running request. Idle rows (padding), and
prefill rows whose prompt continues in a later step, have no request slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.models.decoder import Caches
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.sampler import draw
from pallas_attn.models.engine.step.packed import PackedStep


def run_step(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: Sequence[Array],
    caches: Caches,
    last_tokens: Int32[Array, "slots"],
    packed: Int32[Array, "n"],
) -> tuple[Int32[Array, "rows"], Float[Array, "tokens V"] | None, Caches, Int32[Array, "slots"]]:
    """Run one step on the device.

    Args:
      model_step: the model as a function (weights, tokens, caches, metadata) -> (logits, caches), from `split_model`.
      config: sizes for which the runner compiles.
      bucket: padded shape of the step.
      weights: the model's weights.
      caches: caches of all layers.
      last_tokens: int32 [request slots], the last sampled token of each running request.
      packed: the step's metadata, from `PackedStep.pack`.

    Returns:
      Sampled tokens int32 [rows], of the bucket's decode rows, then of its prefill rows; logits of the prefill tokens,
      or None if `bucket.all_logits` is False; caches with the new tokens; and the new `last_tokens`.
    """
    step, tokens, sampling, logit_rows = read_step(config, bucket, packed, last_tokens)
    logits, caches = model_step(weights, tokens, caches, step.metadata(config.page_size, logit_rows))
    chosen, prompt_logits, last_tokens = sample_rows(bucket, step, logits, sampling, last_tokens)
    return chosen, prompt_logits, caches, last_tokens


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
    bucket: Bucket,
    step: PackedStep,
    logits: Float[Array, "n V"],
    sampling: Int32[Array, "rows"],
    last_tokens: Int32[Array, "slots"],
) -> tuple[Int32[Array, "rows"], Float[Array, "tokens V"] | None, Int32[Array, "slots"]]:
    """Sample a token for each row from the logits of a step.

    Args:
      bucket: padded shape of the step.
      step: metadata of the step, from `read_step`.
      logits: result of the model: logits of all input tokens if `bucket.all_logits`, else of the tokens `sampling`.
      sampling: index of the input token after which a token is sampled, for each row, from `read_step`.
      last_tokens: int32 [request slots], the last sampled token of each running request.

    Returns:
      Sampled tokens; logits of the prefill tokens, or None if `bucket.all_logits` is False; and `last_tokens` with the
      sampled tokens of rows that have a request slot.
    """
    chosen = draw(logits[sampling] if bucket.all_logits else logits, step.sampling_rows())
    slots = jnp.concatenate([step.decode_request_slots, step.prefill_request_slots])
    slots = jnp.where(slots < 0, last_tokens.shape[0], slots)  # .at would count -1 from the end
    # NONFINITE (-1) ends its request when the host reads it. Steps launched until then use this token as an input,
    # which must be a valid token id.
    last_tokens = last_tokens.at[slots].set(jnp.maximum(chosen, 0), mode="drop")
    return chosen, logits[bucket.decode_rows :] if bucket.all_logits else None, last_tokens
