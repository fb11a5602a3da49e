"""Verification of an engine's tokens against an independent computation of the same weights.

The plain run computes each sequence in one forward pass: no chunks, no batch, no absorbed weights, an empty cache. It
is teacher-forced: token i is compared with the plain run's choice after the engine's first i tokens, with the same seed
and position. So one wrong token does not make the following tokens wrong.

The loss of a token is the amount by which its logit would have to rise for the plain run to choose it (`losses` of
`sampler.py`). It is 0 if both choose the same token. For greedy sampling it is the difference to the highest logit.

float32. Every token may lose at most `TOLERANCE`. In 28,000 tokens of small random models and of the goldens, logits
differed by at most 4e-5, and no token differed. Quantised caches have a larger tolerance, because a rounding error in
the last place can move a value to the next of 255 steps: in 5,800 tokens logits differed by at most 0.012.

bfloat16. No fixed tolerance works. Logits usually differ by 0.05, but by several units where rounding changes a token's
experts. In a small random model 20% of the tokens then differ, and a fixed tolerance that accepts them also accepts a
wrong cache. Therefore the rounding error is measured, and losses are compared with losses that rounding alone causes:

1. The plain run computes all logits twice, with float32 weights and in bfloat16. The difference is a sample of the
   rounding error: noise[i], a vector of the vocabulary's size for each output position i.
2. Losses are measured against the float32 logits, which have no rounding error of this size.
3. For each position i, the float32 logits are perturbed with noise[i], noise[i + 1], ..., and the loss of each
   perturbed choice is computed. Mean and variance of these losses say what rounding alone would lose at position i.
4. The losses of a request, and of all requests together, may exceed the sum of the means by `SIGMAS` standard
   deviations plus the largest single loss of step 3.

A correct engine rounds differently from the plain run, but its error has the same size, so its total is near the sum of
the means. Measured with `v3-tiny` in bfloat16 (256 tokens), the noisiest of the small models: the total of a correct
engine is 0.1 and 2.1 standard deviations above the mean, with two implementations of attention. It is 10 standard
deviations above if decode reads one token less, and 90 or more if a page of a shared prefix is overwritten or decode
positions are shifted by one. A single zeroed KV row is at the limit of detection in this model: the total was 10
standard deviations above the mean in one run, and within the limit in another. In a dense model such a row is noticed.
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

from models.decoder import (
    AttentionSettings,
    Caches,
    Decoder,
    KVScales,
    Step,
    over_mesh,
    pad_tokens,
    power_of_two,
    run_sequence,
    specs_of,
    split_model,
    with_settings,
)
from models.decoder.mesh import replicated, spans_processes
from models.engine.request import NONFINITE, SamplingParams
from models.engine.sampler import SamplingRows, losses, sample

TOLERANCE = {"float32": 1e-3, "int8": 0.05, "float8_e4m3fn": 0.05}
"""Largest loss of a token of a float32 model, by the dtype of the model and of its cache."""

MOST_TIED = 0.05
"""Largest share of tokens of a float32 model that may differ within the tolerance."""

SIGMAS = 6.0
"""Standard deviations by which the losses of a bfloat16 model may exceed their expectation."""

_FEW_TIED = 4  # tokens that may differ within the tolerance, whatever the share
_NUM_SHIFTS = 8  # noise vectors per position


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A request and an engine's output for it.

    Attributes:
      prompt_ids, output_ids: token ids of the prompt and of the output.
      params: sampling parameters.
      finished: whether the output is complete, so that its end is checked, too.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token that the plain run does not confirm.

    Attributes:
      position: index in the output.
      got: the engine's token; None if its output ended too early.
      wanted: the plain run's token; None if the output should have ended or the plain run has no token.
      margin: difference in logits between `wanted` and the second-best token of the plain run; 0 without `wanted`.
      finite: whether the plain run's logits are finite. If they are not, no token is right.
    """

    position: int
    got: int | None
    wanted: int | None
    margin: float
    finite: bool = True


@dataclasses.dataclass(frozen=True)
class RoundingLoss:
    """Losses of tokens of a model in 16 bits, and the losses that rounding alone causes.

    Attributes:
      loss: sum of the losses of the engine's tokens.
      expected, variance: sums of mean and variance of the losses that rounding alone causes at the same positions.
      largest: largest single loss that rounding alone caused.
    """

    loss: float
    expected: float
    variance: float
    largest: float

    @property
    def allowed(self) -> float:
        """Upper limit of `loss`."""
        return self.expected + SIGMAS * math.sqrt(self.variance) + self.largest

    @property
    def is_too_large(self) -> bool:
        return not self.loss <= self.allowed  # True for NaN

    @staticmethod
    def total(each: Sequence[RoundingLoss]) -> RoundingLoss:
        """Sum of the losses of all requests."""
        return RoundingLoss(
            sum(one.loss for one in each),
            sum(one.expected for one in each),
            sum(one.variance for one in each),
            max((one.largest for one in each), default=0.0),
        )


@dataclasses.dataclass(frozen=True)
class RequestCheck:
    """Comparison of one request's tokens with the plain run's.

    Attributes:
      equal: number of equal tokens.
      tied: number of tokens that differ, but whose loss is within the tolerance or may be a rounding error.
      difference: the first token that differs otherwise; tokens after it are not counted. In 16 bits: the token with
        the largest loss, if the request's losses are too large.
      rounding: losses of a model in 16 bits; None for float32.
      worst: the token with the largest loss, in 16 bits; None if all are equal.
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
      tolerance: largest loss of a token; None for a model in 16 bits, whose `rounding` is limited.
    """

    requests: tuple[RequestCheck, ...]
    tolerance: float | None

    @property
    def passed(self) -> bool:
        too_many = self.too_many_tied or self.lost_too_much
        return not too_many and all(check.difference is None for check in self.requests)

    @property
    def rounding(self) -> RoundingLoss | None:
        """Losses of all requests of a model in 16 bits; None for float32."""
        each = [check.rounding for check in self.requests if check.rounding is not None]
        return RoundingLoss.total(each) if each else None

    @property
    def lost_too_much(self) -> bool:
        """Whether the losses of all requests together are larger than rounding explains."""
        return self.rounding is not None and self.rounding.is_too_large

    @property
    def too_many_tied(self) -> bool:
        """Whether more tokens differ within the tolerance than rounding explains; False for 16 bits."""
        return self.tolerance is not None and self.tied > max(_FEW_TIED, MOST_TIED * self.compared)

    @property
    def compared(self) -> int:
        """Number of tokens that were compared and counted."""
        return self.equal + self.tied

    @property
    def equal(self) -> int:
        return sum(check.equal for check in self.requests)

    @property
    def tied(self) -> int:
        return sum(check.tied for check in self.requests)


class Choices(NamedTuple):
    """Choices of the plain run after the prompt and after each output token, and losses of the output tokens.

    Attributes:
      tokens: int32 [outputs + 1]; NONFINITE where logits are not finite.
      margins: float32 [outputs + 1], difference in logits to the second-best token.
      losses: float32 [outputs], loss of each output token.
      expected, variance, largest: float32 [outputs], of the losses that rounding alone causes; None for float32.
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
    """Compare an engine's tokens with the plain run's.

    Args:
      model: the engine's model.
      decoded: requests and their outputs.
      max_len: largest number of tokens of a sequence in the engine, prompt and output.
      tolerance: largest loss of a token. None for `TOLERANCE` of a float32 model and its cache, and for the measured
        rounding error of a model in 16 bits.
      cache_dtype, kv_scales: of the engine's cache, as in `EngineConfig`.
    """
    dtype = model.embed_tokens[...].dtype
    if tolerance is None and dtype == jnp.float32:
        names = ("float32", "" if cache_dtype is None else jnp.dtype(cache_dtype).name)
        tolerance = max(TOLERANCE[name] for name in names if name in TOLERANCE)
    max_output = max((len(d.output_ids) for d in decoded), default=0)
    plain = PlainRun(model, max_output, cache_dtype, kv_scales)
    checks = [plain.check(d, max_len, tolerance) for d in decoded]
    largest = max((check.rounding.largest for check in checks if check.rounding is not None), default=0.0)
    return Verification(tuple(_with_excess(check, largest) for check in checks), tolerance)


def _with_excess(check: RequestCheck, largest: float) -> RequestCheck:
    """Report the worst token of a request as its difference if the losses are too large, given the largest single loss
    that rounding caused in any request."""
    if check.rounding is None:
        return check
    rounding = dataclasses.replace(check.rounding, largest=largest)
    difference = check.difference or (check.worst if rounding.is_too_large else None)
    return dataclasses.replace(check, rounding=rounding, difference=difference)


def _due_length(decoded: Decoded, max_len: int, eos: Collection[int]) -> int:
    """Length that the output should have if its tokens are right."""
    params = decoded.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    stopped = (i + 1 for i, token in enumerate(decoded.output_ids) if token in stops)
    return min(next(stopped, params.max_tokens), params.max_tokens, max_len - len(decoded.prompt_ids))


class PlainRun:
    """A model's choices after each token of a sequence, computed in one forward pass."""

    def __init__(
        self,
        model: Decoder,
        max_output: int,
        cache_dtype: DTypeLike | None = None,
        kv_scales: KVScales | None = None,
    ):
        """Prepare a plain run. Sequences are padded to powers of two; each length is compiled at its first use.

        Args:
          model: the model. Attention runs in the portable implementation, with MLA expanded.
          max_output: largest number of tokens of an output.
          cache_dtype, kv_scales: of the engine's cache, so that quantised keys and values are rounded equally.
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
        choose: Callable[..., Any] = functools.partial(_choose, step, allocate)
        self._mesh = model.mesh
        if model.mesh is not None:
            everywhere = PartitionSpec()
            arguments = (specs_of(self._weights), *[everywhere] * 6)
            choose = over_mesh(choose, model.mesh, arguments, everywhere)
        self._choose = jax.jit(choose)

    def check(self, decoded: Decoded, max_len: int, tolerance: float | None) -> RequestCheck:
        """Compare one request's tokens with the plain run's.

        Args:
          decoded: the request and its output.
          max_len: as in `verify`.
          tolerance: largest loss of a token; None to compare the sum of the losses with the measured rounding error.
        """
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
        check = RequestCheck(equal, tied, difference, rounding, worst)
        return _with_excess(check, rounding.largest)

    def choose(self, decoded: Decoded) -> Choices:
        """Sample after the prompt and after each output token, and compute the losses of the output tokens."""
        tokens = [*decoded.prompt_ids, *decoded.output_ids]
        padded = pad_tokens(tokens)
        first, last = len(decoded.prompt_ids) - 1, len(tokens) - 1
        rows = np.minimum(np.arange(first, first + self._num_rows, dtype=np.int32), last)
        following = padded[np.minimum(rows + 1, last)]
        params = decoded.params
        sampling = SamplingRows(
            temperature=jnp.full(rows.shape, params.temperature, jnp.float32),
            top_k=jnp.full(rows.shape, min(params.top_k, np.iinfo(np.int32).max), jnp.int32),
            top_p=jnp.full(rows.shape, params.top_p, jnp.float32),
            seed=jnp.full(rows.shape, params.seed, jnp.uint32),
            position=jnp.asarray(rows + 1),
        )
        count = len(decoded.output_ids)
        arguments = (padded, np.int32(len(tokens)), rows, sampling, following, np.int32(max(count, 1)))
        if self._mesh is not None and spans_processes(self._mesh):
            arguments = jax.tree.map(functools.partial(replicated, mesh=self._mesh), arguments)
        chosen, margins, *losses = (np.asarray(values) for values in self._choose(self._weights, *arguments))
        return Choices(chosen[: count + 1], margins[: count + 1], *(values[:count] for values in losses))


def _end(output: Sequence[int], due: int, finished: bool, choices: Choices) -> Difference | None:
    """Return the difference of an output that ends too late or too early."""
    if len(output) > due:
        return Difference(due, output[due], None, 0.0)
    if len(output) == due or not finished:
        return None
    wanted = int(choices.tokens[-1])
    if wanted == NONFINITE:
        return Difference(len(output), None, None, 0.0, finite=False)
    return Difference(len(output), None, wanted, float(choices.margins[-1]))


def _rounding(output: Sequence[int], choices: Choices) -> tuple[RoundingLoss, Difference | None]:
    """Sum the losses of a request. Return them, and the token with the largest loss."""
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
    weights: list[Array],
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
    rows: Int32[Array, "n"],
    sampling: SamplingRows,
    following: Int32[Array, "n"],
    num_outputs: Int32[Array, ""],
) -> tuple[Array, ...]:
    """Sample at `rows` with float32 weights, and compute the losses of the tokens that follow.

    Args:
      allocate: allocates the cache of the float32 run; and that of the run in the model's dtype, unless it is float32.
      num_outputs: number of leading rows that are followed by an output token, at least 1.

    Returns:
      The fields of `Choices`, each [n].
    """
    exact_weights = [w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w for w in weights]
    with jax.default_matmul_precision("highest"):  # the default on GPUs rounds float32 operands to TF32
        exact, _ = run_sequence(step, exact_weights, allocate[0], tokens, num_tokens, rows)
    wanted, margins = sample(exact, sampling)
    lost = losses(exact, sampling, following)
    if len(allocate) == 1:
        return wanted, margins, lost
    rounded, _ = run_sequence(step, weights, allocate[1], tokens, num_tokens, rows)
    noise = rounded - exact  # [n, V]
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)

    def losses_at(shift: Int32[Array, ""]) -> Float[Array, "n"]:
        """Losses of the choices with the noise of the position `shift` positions later."""
        chosen, _ = sample(exact + noise[(row + shift) % num_outputs], sampling)
        return losses(exact, sampling, jnp.maximum(chosen, 0))

    by_rounding = jax.lax.map(losses_at, jnp.arange(_NUM_SHIFTS, dtype=jnp.int32))  # [shifts, n]
    wanted = jnp.where(jnp.all(jnp.isfinite(noise), axis=-1), wanted, NONFINITE)
    statistics = (jnp.mean(by_rounding, axis=0), jnp.var(by_rounding, axis=0), jnp.max(by_rounding, axis=0))
    return wanted, margins, lost, *statistics
