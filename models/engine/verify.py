"""Verification of an engine's tokens against an independent computation with the same weights, the plain run.

The plain run computes the prompt and output of a request in one forward pass, with an empty cache, without other
requests, and without prompt chunks. MLA is expanded (not absorbed), except in sparse attention. After each prefix of
the output the plain run chooses the next token, with the request's sampling parameters, seed and position. Its token i
thus follows the engine's tokens 0 to i - 1, so a wrong token of the engine does not make later tokens differ.

The loss of a token of the engine is the amount by which its logit in the plain run would have to rise for the plain run
to choose it (`losses` of `sampler.py`). The loss is 0 if both chose the same token. For greedy sampling it is the
difference between the highest logit and the logit of the engine's token.

Models in float32. The loss of every token must be at most `TOLERANCE`. In 28,000 tokens of small random models and of
the models in `tests/goldens`, logits differed by at most 4e-5, and no token differed. Quantised caches have a larger
tolerance, because a tiny difference before quantisation can change a cached value by one of 255 steps. In 5,800 tokens
with quantised caches, logits differed by at most 0.012.

Models in bfloat16. Logits usually differ by 0.05, but by several units if rounding changes the experts that a token
selects. In a small random model 20% of the tokens then differ. A fixed tolerance that accepts these tokens would also
accept a wrong cache. Therefore the rounding error is measured, and the losses are compared with the losses that
rounding alone causes:

1. The plain run computes all logits twice: with the weights converted to float32, and in bfloat16. The difference is a
   sample of the rounding error: noise[i], float32 [V], for each output position i. If the output has less than
   `_LEAST_NOISE` positions, the last positions of the prompt also provide noise.
2. Losses are computed from the float32 logits.
3. For each position i, noise[i], noise[i + 1], ... are added to the float32 logits, one at a time. A token is chosen
   from each sum, and its loss is computed. Mean and variance of these losses estimate the loss that rounding causes at
   position i.
4. For each request, and for all requests together, the sum of the engine's losses may exceed the sum of the means by
   `SIGMAS` standard deviations plus the largest single loss of item 3.

A correct engine rounds differently from the plain run, but its rounding error has the same distribution. Therefore its
losses add up to nearly the sum of the means. In small models of six families (256 tokens each), they were at most 3.4
standard deviations above it. An overwritten page of a shared prefix gave 14 in `v3-tiny`, the small model with the
largest rounding error. A cache entry of a single token set to zero is not always detected in this model. In a dense
model it is. With very few tokens, the noise may not contain a rare event that happens in the engine, such as another
choice of experts, and a correct engine may exceed the limit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_attn.models.decoder import (
    AttentionSettings,
    Caches,
    Decoder,
    KVScales,
    Step,
    over_mesh,
    pad_tokens,
    page_size_of,
    power_of_two,
    run_sequence,
    specs_of,
    split_model,
    with_settings,
)
from pallas_attn.models.decoder.mesh import replicated, spans_processes
from pallas_attn.models.engine.request import NONFINITE, Request, RowFlags, SamplingParams
from pallas_attn.models.engine.sampler import SamplingRows, losses, sample

TOLERANCE = {"float32": 1e-3, "int8": 0.05, "float8_e4m3fn": 0.05}
"""Maximum loss of a token of a float32 model, in units of logits. The key is the dtype of the cache: float32, or the
dtype of a quantised cache."""

MOST_TIED = 0.05
"""Maximum share of tokens of a float32 model that differ from the plain run's, even if their losses are within the
tolerance. A larger share cannot be explained by rounding."""

SIGMAS = 6.0
"""Standard deviations by which the sum of losses of a bfloat16 model may exceed its expected value."""

_FEW_TIED = 4  # number of tokens that may differ within the tolerance even if their share exceeds MOST_TIED
_NUM_SHIFTS = 8  # noise vectors that are added to the logits of each position, one at a time

_LEAST_NOISE = 32  # number of positions that provide noise, if the sequence is long enough


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A request and the engine's output for the request. A request with a token filter cannot be verified.

    Attributes:
      prompt_ids, output_ids: token ids of the prompt and of the output.
      params: sampling parameters.
      finished: whether the output is complete. If True, an output that ends too early is an error.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class Difference:
    """A position at which the engine's output is wrong according to the plain run.

    Attributes:
      position: index in the output.
      got: the engine's token; None if its output ended too early.
      wanted: the plain run's token; None if the output should have ended before, or if the logits are not finite.
      margin: difference between the highest and second-highest perturbed logits of the plain run (`sampler.py`; logits
        with scaled Gumbel noise, equal to the logits at temperature 0). The highest is the perturbed logit of `wanted`.
        0 if `wanted` is None.
      finite: whether the plain run's logits are finite. If False, every token of the engine counts as wrong.
    """

    position: int
    got: int | None
    wanted: int | None
    margin: float
    finite: bool = True


@dataclasses.dataclass(frozen=True)
class RoundingLoss:
    """Sum of the losses of the engine's tokens for a 16-bit model, and the losses that rounding alone causes.

    Attributes:
      loss: sum of the losses of the engine's tokens.
      expected, variance: sums, over the same positions, of the mean and of the variance of the losses that rounding
        causes.
      largest: largest single loss that rounding caused.
    """

    loss: float
    expected: float
    variance: float
    largest: float

    @property
    def allowed(self) -> float:
        """Maximum of `loss` for a correct engine."""
        return self.expected + SIGMAS * math.sqrt(self.variance) + self.largest

    @property
    def is_too_large(self) -> bool:
        return not self.loss <= self.allowed  # True for NaN

    @staticmethod
    def total(each: Sequence[RoundingLoss]) -> RoundingLoss:
        """Return the sums over all requests, and the largest single loss of any request."""
        return RoundingLoss(
            sum(one.loss for one in each),
            sum(one.expected for one in each),
            sum(one.variance for one in each),
            max((one.largest for one in each), default=0.0),
        )


@dataclasses.dataclass(frozen=True)
class RequestCheck:
    """Comparison of one request's tokens with the plain run's tokens.

    There are two kinds of comparison. If a tolerance is given (the default for float32 models), the loss of each token
    must be within the tolerance. Otherwise (16-bit models), only the sum of the losses is limited.

    Attributes:
      equal: number of equal tokens.
      tied: number of tokens that differ. If a tolerance is given, only tokens whose loss is within the tolerance.
      difference: the error that was found; None if the request passes. If a tolerance is given, the error is the first
        token whose loss exceeds it; this token and later tokens are in neither `equal` nor `tied`. Otherwise, if the
        sum of the losses is too large, the error is the token with the largest loss. In both kinds of comparison, the
        error may also be that the output ends too early or too late, or that the plain run's logits are not finite.
      rounding: sum of the losses, and its limit; None if a tolerance is given, or if the plain run's logits are not
        finite.
      worst: the token with the largest loss; None if `rounding` is None, the output is empty, or this token equals the
        plain run's.
    """

    equal: int
    tied: int
    difference: Difference | None
    rounding: RoundingLoss | None = dataclasses.field(default=None, compare=False)
    worst: Difference | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of all requests with the plain run.

    Attributes:
      requests: one check per request, in order.
      tolerance: maximum loss of a token; None if only sums of losses are limited (16-bit models).
    """

    requests: tuple[RequestCheck, ...]
    tolerance: float | None

    @property
    def passed(self) -> bool:
        too_many = self.too_many_tied or self.lost_too_much
        return not too_many and all(check.difference is None for check in self.requests)

    @property
    def rounding(self) -> RoundingLoss | None:
        """Sum of the losses of all requests; None if `tolerance` is not None."""
        each = [check.rounding for check in self.requests if check.rounding is not None]
        return RoundingLoss.total(each) if each else None

    @property
    def lost_too_much(self) -> bool:
        """Whether the sum of the losses of all requests is above its limit, `RoundingLoss.allowed`. False if
        `tolerance` is not None: the loss of each token is then limited instead."""
        return self.rounding is not None and self.rounding.is_too_large

    @property
    def too_many_tied(self) -> bool:
        """Whether too many tokens differ with losses within the tolerance: more than `_FEW_TIED` tokens, and more than
        the share `MOST_TIED`. False if `tolerance` is None."""
        return self.tolerance is not None and self.tied > max(_FEW_TIED, MOST_TIED * self.compared)

    @property
    def compared(self) -> int:
        """Number of tokens that were compared. Tokens from the first error of a request on are not counted."""
        return self.equal + self.tied

    @property
    def equal(self) -> int:
        return sum(check.equal for check in self.requests)

    @property
    def tied(self) -> int:
        return sum(check.tied for check in self.requests)


class Choices(NamedTuple):
    """Tokens that the plain run chooses after the prompt and after each output token, and losses of the output tokens.

    Attributes:
      tokens: int32 [outputs + 1], chosen token; NONFINITE where logits are NaN or infinite.
      margins: float32 [outputs + 1], difference between the highest and second-highest perturbed logits (see
        `Difference.margin`).
      losses: float32 [outputs], loss of each output token of the engine.
      expected, variance, largest: float32 [outputs], mean, variance and maximum of the losses that rounding causes at
        each position; None for float32 models.
    """

    tokens: np.ndarray
    margins: np.ndarray
    losses: np.ndarray
    expected: np.ndarray | None = None
    variance: np.ndarray | None = None
    largest: np.ndarray | None = None


def verify(
    model: Decoder,
    decoded: Sequence[Decoded],
    *,
    max_len: int,
    tolerance: float | None = None,
    cache_dtype: DTypeLike | None = None,
    kv_scales: KVScales | None = None,
) -> Verification:
    """Compare an engine's tokens with the plain run's tokens.

    Args:
      model: the engine's model.
      decoded: requests and their outputs.
      max_len: maximum number of tokens of a sequence in the engine, prompt and output.
      tolerance: maximum loss of a token. None for `TOLERANCE` if the model is in float32. For other models, None
        compares sums of losses with the measured rounding error.
      cache_dtype, kv_scales: dtype and static scales of the engine's cache, as in `EngineConfig`.
    """
    dtype = model.embed_tokens[...].dtype
    if tolerance is None and dtype == jnp.float32:
        names = ("float32", "" if cache_dtype is None else jnp.dtype(cache_dtype).name)
        tolerance = max(TOLERANCE[name] for name in names if name in TOLERANCE)
    max_output = max((len(d.output_ids) for d in decoded), default=0)
    plain = PlainRun(model, max_output, cache_dtype, kv_scales)
    checks = [plain.compare(d, max_len, tolerance) for d in decoded]
    largest = max((check.rounding.largest for check in checks if check.rounding is not None), default=0.0)
    return Verification(tuple(_with_excess(check, largest) for check in checks), tolerance)


def _with_excess(check: RequestCheck, largest: float) -> RequestCheck:
    """Compare the sum of losses of a request with its limit; if it is too large, set `difference` to the worst token.

    Args:
      check: check of a request; returned unchanged if it has a tolerance.
      largest: largest single loss that rounding caused in any request, which is part of the limit.
    """
    if check.rounding is None:
        return check
    rounding = dataclasses.replace(check.rounding, largest=largest)
    difference = check.difference or (check.worst if rounding.is_too_large else None)
    return dataclasses.replace(check, rounding=rounding, difference=difference)


def _due_length(decoded: Decoded, max_len: int, eos: Collection[int]) -> int:
    """Return the length at which the output should end: at the first stop token, `max_tokens` or the maximum sequence
    length."""
    params = decoded.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    stopped = (i + 1 for i, token in enumerate(decoded.output_ids) if token in stops)
    return min(next(stopped, params.max_tokens), params.max_tokens, max_len - len(decoded.prompt_ids))


class PlainRun:
    """Computes the plain run: the tokens that a model chooses after each token of a sequence, in one forward pass.

    Attributes:
      rounds: whether the model is not in float32, so that losses caused by rounding are measured.
    """

    def __init__(
        self,
        model: Decoder,
        max_output: int,
        cache_dtype: DTypeLike | None = None,
        kv_scales: KVScales | None = None,
    ):
        """Prepare a plain run. Sequences are padded to powers of two, and each padded length is compiled when it is
        first needed.

        Args:
          model: the model. Attention runs in the implementation "xla". MLA is expanded, except in sparse attention.
          max_output: maximum number of tokens of an output.
          cache_dtype, kv_scales: dtype and static scales of the engine's cache. Keys and values are quantised like in
            the engine.
        """
        settings = AttentionSettings(implementation="xla", index_topk=model.settings.index_topk)
        step, self._weights = split_model(with_settings(model, settings))
        self._eos = model.config.eos_token_ids
        self._num_rows = power_of_two(max_output + 1, 32)
        self.rounds = model.embed_tokens[...].dtype != jnp.float32
        is_quantised = cache_dtype is not None and jnp.dtype(cache_dtype).itemsize == 1
        exact_dtype = cache_dtype if is_quantised else jnp.float32
        dtypes = (exact_dtype, cache_dtype) if self.rounds else (exact_dtype,)
        allocate = [functools.partial(model.allocate_caches, dtype=dtype, scales=kv_scales) for dtype in dtypes]
        choose: Callable[..., Any] = functools.partial(_choose, step, allocate, page_size_of(model.config))
        self._mesh = model.mesh
        if model.mesh is not None:
            everywhere = PartitionSpec()
            arguments = (specs_of(self._weights), *[everywhere] * 6)
            choose = over_mesh(choose, model.mesh, arguments, everywhere)
        # XLA would keep some intermediate results of a bfloat16 model in float32, and the noise would be too small for
        # engines whose kernels round them.
        self._choose = jax.jit(choose, compiler_options={"xla_allow_excess_precision": False})

    def check(self, decoded: Decoded, max_len: int, tolerance: float | None) -> RequestCheck:
        """Compare one request's tokens with the plain run's tokens.

        Args:
          decoded: the request and its output.
          max_len: maximum number of tokens of a sequence in the engine, prompt and output.
          tolerance: maximum loss of a token; None to compare the sum of the losses with the measured rounding error.
        """
        compared = self.compare(decoded, max_len, tolerance)
        return compared if compared.rounding is None else _with_excess(compared, compared.rounding.largest)

    def compare(self, decoded: Decoded, max_len: int, tolerance: float | None) -> RequestCheck:
        """Compare as `check`, but do not compare the sum of the losses with its limit. `verify` does this with the
        largest single loss of all requests."""
        output = list(decoded.output_ids)
        choices = self.choose(decoded)
        due = _due_length(decoded, max_len, self._eos)
        equal, tied = 0, 0
        for i, got in enumerate(output[:due]):
            wanted = int(choices.tokens[i])
            if wanted == NONFINITE:
                return RequestCheck(equal, tied, Difference(i, got, None, 0.0, finite=False))
            if got == wanted:
                equal += 1
            elif tolerance is None or choices.losses[i] <= tolerance:
                tied += 1
            else:
                return RequestCheck(equal, tied, Difference(i, got, wanted, float(choices.margins[i])))
        difference = _end(output, due, decoded.finished, choices)
        if tolerance is not None:
            return RequestCheck(equal, tied, difference)
        rounding, worst = _rounding(output[:due], choices)
        return RequestCheck(equal, tied, difference, rounding, worst)

    def choose(self, decoded: Decoded) -> Choices:
        """Choose a token after the prompt and after each output token, and compute the losses of the output tokens.

        Raises:
          NotImplementedError: the request has parameters that change logits depending on earlier tokens or by token id,
            or that need a tokenizer, such as bad_words and structured_outputs.
        """
        if names := decoded.params.text_level():
            reason = "the plain run has no tokenizer and no token filters"
            raise NotImplementedError(f"params: {reason}, so it does not verify {', '.join(names)}")
        flags = Request("verified", tuple(decoded.prompt_ids), decoded.params).flags
        if flags & (RowFlags.PENALTIES | RowFlags.TOKENS) or decoded.params.extra_args:
            raise NotImplementedError(
                "params: the plain run has no repetition_penalty, presence_penalty, frequency_penalty, logit_bias,"
                " allowed_token_ids, min_tokens and extra_args"
            )
        tokens = [*decoded.prompt_ids, *decoded.output_ids]
        padded = pad_tokens(tokens)
        first, last = len(decoded.prompt_ids) - 1, len(tokens) - 1
        start = min(first, max(last + 1 - _LEAST_NOISE, 0))  # positions before `first` only provide noise
        rows = np.minimum(np.arange(start, start + self._num_rows, dtype=np.int32), last)
        following = padded[np.minimum(rows + 1, last)]
        params = decoded.params
        sampling = SamplingRows(
            temperature=jnp.full(rows.shape, params.temperature, jnp.float32),
            top_k=jnp.full(rows.shape, min(params.top_k, np.iinfo(np.int32).max), jnp.int32),
            top_p=jnp.full(rows.shape, params.top_p, jnp.float32),
            min_p=jnp.full(rows.shape, params.min_p, jnp.float32),
            seed=jnp.full(rows.shape, params.seed, jnp.uint32),
            position=jnp.asarray(rows + 1),
        )
        arguments = (padded, np.int32(len(tokens)), rows, sampling, following, np.int32(last + 1 - start))
        if self._mesh is not None and spans_processes(self._mesh):
            arguments = jax.tree.map(functools.partial(replicated, mesh=self._mesh), arguments)
        chosen, margins, *losses = (np.asarray(values) for values in self._choose(self._weights, *arguments))
        after, outputs = slice(first - start, last + 1 - start), slice(first - start, last - start)
        return Choices(chosen[after], margins[after], *(values[outputs] for values in losses))


def _end(output: Sequence[int], due: int, finished: bool, choices: Choices) -> Difference | None:
    """Return a difference if the output is longer than `due` tokens, or finished with fewer; None otherwise."""
    if len(output) > due:
        return Difference(due, output[due], None, 0.0)
    if len(output) == due or not finished:
        return None
    wanted = int(choices.tokens[-1])
    if wanted == NONFINITE:
        return Difference(len(output), None, None, 0.0, finite=False)
    return Difference(len(output), None, wanted, float(choices.margins[-1]))


def _rounding(output: Sequence[int], choices: Choices) -> tuple[RoundingLoss, Difference | None]:
    """Return the sums of the losses of a request, and the token with the largest loss if it differs from the plain
    run's token."""
    if choices.expected is None or choices.variance is None or choices.largest is None:
        raise ValueError("tolerance: expected a number for a float32 model, got None")
    end = len(output)
    each = (choices.losses, choices.expected, choices.variance)
    loss, expected, variance = (float(np.sum(values[:end], dtype=np.float64)) for values in each)
    rounding = RoundingLoss(loss, expected, variance, float(np.max(choices.largest[:end], initial=0.0)))
    if not end:
        return rounding, None
    i = int(np.argmax(choices.losses[:end]))
    got, wanted = output[i], int(choices.tokens[i])
    return rounding, None if got == wanted else Difference(i, got, wanted, float(choices.margins[i]))


def _choose(
    step: Step,
    allocate: Sequence[Callable[[int, int], Caches]],
    page_size: int,
    weights: list[Array],
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
    rows: Int32[Array, "n"],
    sampling: SamplingRows,
    following: Int32[Array, "n"],
    num_rows: Int32[Array, ""],
) -> tuple[Array, ...]:
    """Choose a token after each of n positions with float32 weights, and compute the loss of the engine's token there.

    Args:
      step: the model as a function (weights, tokens, caches, metadata) -> (logits, caches), from `split_model`.
      allocate: functions (num_pages, page_size) that allocate a cache: for the float32 run, and, unless the model is in
        float32, for the run in the model's dtype.
      page_size: tokens per page of these caches.
      weights: the model's weights.
      tokens: prompt and output, padded.
      num_tokens: number of tokens that are not padding.
      rows: positions after which a token is chosen.
      sampling: sampling parameters for the token after each position.
      following: the engine's token after each position.
      num_rows: number of leading entries of `rows` that are different positions, at least 1.

    Returns:
      The fields of `Choices`, each [n]; the last three only if the model is not in float32.
    """
    exact_weights = [w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w for w in weights]
    with jax.default_matmul_precision("highest"):  # the default on GPUs rounds float32 operands to TF32
        exact, _ = run_sequence(step, exact_weights, allocate[0], tokens, num_tokens, rows, page_size)
    wanted, margins = sample(exact, sampling)
    lost = losses(exact, sampling, following)
    if len(allocate) == 1:
        return wanted, margins, lost
    rounded, _ = run_sequence(step, weights, allocate[1], tokens, num_tokens, rows, page_size)
    noise = rounded - exact  # [n, V]
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)

    def losses_at(shift: Int32[Array, ""]) -> Float[Array, "n"]:
        """Return the losses of tokens that are chosen from perturbed logits: the noise of the position `shift` rows
        later is added to the logits of each position."""
        chosen, _ = sample(exact + noise[(row + shift) % num_rows], sampling)
        return losses(exact, sampling, jnp.maximum(chosen, 0))

    by_rounding = jax.lax.map(losses_at, jnp.arange(_NUM_SHIFTS, dtype=jnp.int32))  # [shifts, n]
    wanted = jnp.where(jnp.all(jnp.isfinite(noise), axis=-1), wanted, NONFINITE)
    statistics = (jnp.mean(by_rounding, axis=0), jnp.var(by_rounding, axis=0), jnp.max(by_rounding, axis=0))
    return wanted, margins, lost, *statistics
