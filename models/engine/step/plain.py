"""The programs of a step without drafts. A program is a function that the runner compiles.

    forward(weights, caches, last tokens, metadata)  ->  logits of the rows that sample, caches
    sample(logits, sampling parameters, masks)       ->  tokens, log probabilities, last tokens

`forward` is compiled for each bucket (padded batch shape), `sample` for each number of rows. The host launches `sample`
after it has computed the token masks of the step, while the device runs `forward`. A third program, `score_prompts`,
runs only in steps that compute log probabilities of prompt tokens.

The inputs of decode rows are the tokens that the previous steps sampled, which stay on the device. The inputs of
prefill rows are prompt tokens from the host. A request slot is the index of a running request. Idle rows (padding), and
prefill rows whose prompt continues in a later step, have no request slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_attn.models.decoder import Caches
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.logit_edits import EditRows, EditState, make_edit
from pallas_attn.models.engine.logprobs import pack_logprobs, pack_prompt_logprobs
from pallas_attn.models.engine.request import RowFlags
from pallas_attn.models.engine.sampler import draw
from pallas_attn.models.engine.step.packed import PackedStep, RowParameters


class StepOutputs(NamedTuple):
    """Results of a forward program, besides the caches.

    Attributes:
      rows: int32 [m], input of the sample program: `RowParameters.pack` of the rows; with drafts `PackedStep.pack`.
      logits: float32 [n, V], logits after which tokens are sampled.
      prompt_hidden: [prefill tokens, D], hidden states of the prefill tokens after the final norm; None without prefill
        tokens, or if `Bucket.skips_layers`.
      decode_hidden: [n, D], hidden states of the inputs of decode rows; None unless a proposer needs them.
      prompt_logits: float32 [prefill tokens, V], logits of the prefill tokens; None if `Bucket.all_logits` is False.
    """

    rows: Any
    logits: Any
    prompt_hidden: Any = None
    decode_hidden: Any = None
    prompt_logits: Any = None

    def for_sampling(self, *, needs_hidden: bool = False) -> StepOutputs:
        """Return the fields that the sample program needs. The others are None."""
        needed = self._replace(prompt_logits=None)
        return needed if needs_hidden else needed._replace(prompt_hidden=None, decode_hidden=None)


def forward(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: Sequence[Array],
    caches: Caches,
    last_tokens: Int32[Array, "slots"],
    packed: Int32[Array, "n"],
    drafts: None = None,
) -> tuple[StepOutputs, Caches]:
    """Run the model on the tokens of a step.

    Args:
      model_step: the model as a function (weights, tokens, caches, metadata) -> (logits, caches), from `split_model`.
      config: sizes for which the runner compiles.
      bucket: padded shape of the step.
      weights: the model's weights.
      caches: caches of all layers.
      last_tokens: int32 [request slots], the last sampled token of each running request.
      packed: the step's metadata, from `PackedStep.pack`.
      drafts: None. Only steps with speculation have drafts.

    Returns:
      The outputs for `sample`, and the caches with the new tokens.
    """
    step, tokens, sampling, logit_rows = read_step(config, bucket, packed, last_tokens)
    extra = {"return_hidden": True} if bucket.prefill_tokens and not bucket.skips_layers else {}
    logits, caches, *hidden = model_step(weights, tokens, caches, step.metadata(config.page_size, logit_rows), **extra)
    prompt_hidden = hidden[0][bucket.decode_rows :] if hidden else None
    return make_outputs(bucket, step.row_parameters().pack(), logits, sampling, prompt_hidden), caches


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


def make_outputs(
    bucket: Bucket,
    rows: Int32[Array, "m"],
    logits: Float[Array, "n V"],
    sampling: Int32[Array, "rows"],
    prompt_hidden: Float[Array, "S D"] | None,
    decode_hidden: Float[Array, "d D"] | None = None,
) -> StepOutputs:
    """Make the outputs of a forward program.

    Args:
      bucket: padded shape of the step.
      rows, prompt_hidden, decode_hidden: as in `StepOutputs`.
      logits: logits of all input tokens if `bucket.all_logits`, else of the tokens `sampling`.
      sampling: index of the input token after which a token is sampled, for each row.
    """
    if not bucket.all_logits:
        return StepOutputs(rows, logits, prompt_hidden, decode_hidden)
    num_decode = logits.shape[0] - bucket.prefill_tokens
    return StepOutputs(rows, logits[sampling], prompt_hidden, decode_hidden, logits[num_decode:])


def sample(
    config: RunnerConfig,
    weights: tuple[()],
    caches: tuple[()],
    last_tokens: Int32[Array, "slots"],
    edits: EditState,
    outputs: StepOutputs,
    drafts: None,
    masks: UInt32[Array, "rows W"],
) -> tuple[Int32[Array, "rows"], Int32[Array, "rows words"], tuple[()], Int32[Array, "slots"], EditState]:
    """Sample a token for each row from the logits of a step.

    Args:
      config: sizes for which the runner compiles.
      weights, caches, drafts: empty. Only steps with speculation use them.
      last_tokens: int32 [request slots], the last sampled token of each running request.
      edits: state of the request slots.
      outputs: `rows` and `logits` of the forward program.
      masks: bit masks of allowed tokens of each row; ignored for rows without a token filter.

    Returns:
      Sampled tokens, of the decode rows, then of the prefill rows; their log probabilities as `pack_logprobs`; no
      caches; `last_tokens` with the sampled tokens of rows that have a request slot; and `edits`, which counts these
      tokens.
    """
    parameters = RowParameters.of(config, outputs.rows)
    rows, sampled = parameters.edit_rows(config, masks), parameters.sampling_rows()
    chosen = draw(outputs.logits, sampled, make_edit(rows, sampled.position, edits, config.logits_processor))
    logprobs = logprobs_of_rows(config, rows, outputs.logits, chosen)
    slots = jnp.where(rows.slots < 0, last_tokens.shape[0], rows.slots)  # .at would count -1 from the end
    # NONFINITE (-1) ends its request when the host reads it. Steps launched until then use this token as an input,
    # which must be a valid token id.
    last_tokens = last_tokens.at[slots].set(jnp.maximum(chosen, 0), mode="drop")
    return chosen, logprobs, (), last_tokens, edits.with_sampled(rows, chosen)


def logprobs_of_rows(
    config: RunnerConfig, rows: EditRows, logits: Float[Array, "n V"], tokens: Int32[Array, "n"]
) -> Int32[Array, "n words"]:
    """Return the log probabilities of sampled tokens if a row requests them, else 0; see `pack_logprobs`."""
    is_used = jnp.any(rows.flags & RowFlags.LOGPROBS != 0)
    return pack_logprobs(logits, tokens, config.max_logprobs, is_used)


def score_prompts(
    logits_of: Callable[[Any, Float[Array, "c D"]], Float[Array, "c V"]],
    config: RunnerConfig,
    weights: Sequence[Array],
    hidden: Float[Array, "T D"],
    tokens: Int32[Array, "T"],
) -> Int32[Array, "T words"]:
    """Compute log probabilities of prompt tokens.

    Args:
      logits_of: function from the model's weights and hidden states after the final norm to logits.
      config: sizes for which the runner compiles.
      weights: the model's weights.
      hidden: `StepOutputs.prompt_hidden` of the step.
      tokens: the token after each prefill token; negative if its log probability is not needed.

    Returns:
      Log probability of the token after each prefill token, as `pack_logprobs`.
    """
    return pack_prompt_logprobs(functools.partial(logits_of, weights), hidden, tokens, config.max_logprobs)
