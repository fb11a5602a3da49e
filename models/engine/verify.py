"""Verification of an engine's tokens by decoding again plainly: each sequence in one forward of its own, with no
chunks, no absorbed weights, and a fresh cache.

Every output token is compared with the one that the plain run samples after the same tokens, with the same seed and
position. Two computations round differently, so tokens may differ where a choice is a near tie, and only there.

How near was measured, in 28,000 tokens of the small random models and the goldens. In float32 logits move by at most
4e-5, and no token differed. In bfloat16 they move by 0.05 as a rule, but by several units where a token's experts are
themselves a near tie: 3% of the tokens differed (6% at worst), by margins of up to 4.2. A tolerance that wide says
little about a single token, so the number of tokens that needed it is limited, too.

Some need more than that. Of 2,400 tokens of `v3-tiny` in bfloat16 on a CPU, on one device and two, 11% differed, and
two by more, as did two of 512 on two H100s. One needed 5.8 in the plain run of the same two devices, and 0.2 in that of
one device or in float32, where other experts were chosen. A run in float32 differs from the engine's and from the plain
one more often (18%) than they do from one another. So a model with experts in bfloat16 may have a few such tokens;
float32 is what tells them from wrong ones.

Over quantised keys and values the plain run quantises alike, but a rounding error of the last place can move one to the
next of 255 values: in 5,800 tokens of float32 models logits moved by at most 0.012, and no token differed. Latents in 8
bits are rounded alike, too, new ones included: no token of 192 differed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

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
from models.engine.sampler import SamplingRows, sample

TOLERANCE = {"float32": 1e-3, "bfloat16": 5.0, "int8": 0.05, "float8_e4m3fn": 0.05}
"""Distance at which two logits still count as tied, by the dtype of the model or of its quantised cache."""

MOST_TIED = 0.25
"""Largest share of all tokens that may differ in ties. A wrong cache makes most tokens differ."""

MOST_FAR = 0.01
"""Largest share of all tokens of a model with experts in bfloat16 that may differ by more than the tolerance."""

_FEW_TIED, _FEW_FAR = 4, 1  # tokens too few to judge a share by


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A request and an engine's output for it.

    Attributes:
      prompt_ids, output_ids: as given and as generated.
      params: its sampling parameters.
      finished: whether the output ended by itself, so that its end is checked too.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token that differs from the plain run's.

    Attributes:
      position: in the output, from 0.
      got: the engine's token, None where its output ended too early.
      wanted: the plain run's token, None where the output should have ended or the plain run has none.
      margin: distance in logits by which `wanted` won in the plain run; 0 where there is none.
      finite: whether the plain run's logits were finite here; where they are not, no token is right.
    """

    position: int
    got: int | None
    wanted: int | None
    margin: float
    finite: bool = True


@dataclasses.dataclass(frozen=True)
class RequestCheck:
    """Comparison of one request's tokens with the plain run's.

    Attributes:
      equal: tokens that are the same.
      tied: tokens that differ, but that the plain run would choose if logits moved within the tolerance.
      difference: the first one that differs otherwise; tokens after it are not counted.
      far: tokens that differ by more than the tolerance, of a model where some may; not `difference` then.
    """

    equal: int
    tied: int
    difference: Difference | None
    far: tuple[Difference, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of all requests with the plain run.

    Attributes:
      requests: one check a request, in their order.
      tolerance: distance of logits that counted as tied.
    """

    requests: tuple[RequestCheck, ...]
    tolerance: float

    @property
    def passed(self) -> bool:
        too_many = self.too_many_tied or self.too_many_far
        return not too_many and all(check.difference is None for check in self.requests)

    @property
    def too_many_tied(self) -> bool:
        """Whether tokens differ so often that near ties do not explain it."""
        return self.tied > max(_FEW_TIED, MOST_TIED * self.compared)

    @property
    def too_many_far(self) -> bool:
        """Whether tokens differ by more than the tolerance so often that near ties of experts do not explain it."""
        return self.far > max(_FEW_FAR, MOST_FAR * self.compared)

    @property
    def compared(self) -> int:
        """Tokens that were compared and counted."""
        return self.equal + self.tied + self.far

    @property
    def equal(self) -> int:
        return sum(check.equal for check in self.requests)

    @property
    def tied(self) -> int:
        return sum(check.tied for check in self.requests)

    @property
    def far(self) -> int:
        return sum(len(check.far) for check in self.requests)


def verify(
    model: Decoder,
    decoded: Sequence[Decoded],
    *,
    max_len: int,
    tolerance: float | None = None,
    cache_dtype: DTypeLike | None = None,
    kv_scales: KVScales | None = None,
) -> Verification:
    """Decodes again and compares.

    Args:
      model: the one the engine ran.
      decoded: its requests and their outputs.
      max_len: tokens a sequence could have in the engine, prompt and output.
      tolerance: distance at which logits are tied; None for `TOLERANCE` of the model's dtype, or of a quantised
        cache's.
      cache_dtype, kv_scales: of the engine's cache, as `EngineConfig` has them.
    """
    if tolerance is None:
        names = (model.embed_tokens[...].dtype.name, "" if cache_dtype is None else jnp.dtype(cache_dtype).name)
        tolerance = max(TOLERANCE[name] for name in names if name in TOLERANCE)
    max_output = max((len(d.output_ids) for d in decoded), default=0)
    plain = PlainRun(model, max_output, cache_dtype, kv_scales)
    has_experts = not all(map(model.config.is_dense, range(model.config.num_hidden_layers)))
    may_be_far = has_experts and model.embed_tokens[...].dtype == jnp.bfloat16
    return Verification(tuple(plain.check(d, max_len, tolerance, may_be_far) for d in decoded), tolerance)


def _due_length(decoded: Decoded, max_len: int, eos: Collection[int]) -> int:
    """Length that the output should have, given that its tokens are right."""
    params = decoded.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    stopped = (i + 1 for i, token in enumerate(decoded.output_ids) if token in stops)
    return min(next(stopped, params.max_tokens), params.max_tokens, max_len - len(decoded.prompt_ids))


class PlainRun:
    """A model's choices after each token of a sequence, computed in one forward."""

    def __init__(
        self,
        model: Decoder,
        max_output: int,
        cache_dtype: DTypeLike | None = None,
        kv_scales: KVScales | None = None,
    ):
        """Prepares a plain run. Sequences are padded to powers of two, and each length is compiled when it is first
        used.

        Args:
          model: its weights are used, but attention runs in the portable implementation, with MLA expanded.
          max_output: most tokens of an output.
          cache_dtype, kv_scales: of the cache, so that quantised keys and values are rounded as the engine's were.
        """
        settings = AttentionSettings(implementation="xla", index_topk=model.settings.index_topk)
        step, self._weights = split_model(with_settings(model, settings))
        self._eos = model.config.eos_token_ids
        self._num_rows = power_of_two(max_output + 1, 32)
        allocate = functools.partial(model.allocate_caches, dtype=cache_dtype, scales=kv_scales)
        choose: Callable[..., Any] = functools.partial(_choose, step, allocate)
        self._mesh = model.mesh
        if model.mesh is not None:
            everywhere = PartitionSpec()
            arguments = (specs_of(self._weights), *[everywhere] * 6)
            choose = over_mesh(choose, model.mesh, arguments, everywhere)
        self._choose = jax.jit(choose)

    def check(self, decoded: Decoded, max_len: int, tolerance: float, may_be_far: bool = False) -> RequestCheck:
        """Compares one request with the tokens that are sampled here; arguments as for `verify`.

        Args:
          may_be_far: whether tokens that differ by more than the tolerance are counted, in place of ending the
            comparison.
        """
        output = list(decoded.output_ids)
        wanted, margins, is_tied = self.choose(decoded, tolerance)
        due = _due_length(decoded, max_len, self._eos)
        equal, tied = 0, 0
        far: list[Difference] = []
        for i, got in enumerate(output[:due]):
            if wanted[i] == NONFINITE:
                return RequestCheck(equal, tied, Difference(i, got, None, 0.0, finite=False), tuple(far))
            if got == wanted[i]:
                equal += 1
            elif is_tied[i]:
                tied += 1
            else:
                far.append(Difference(i, got, int(wanted[i]), float(margins[i])))
                if not may_be_far:
                    return RequestCheck(equal, tied, far[0])
        difference = None
        if len(output) > due:
            difference = Difference(due, output[due], None, 0.0)
        elif len(output) < due and decoded.finished:
            if wanted[-1] == NONFINITE:
                difference = Difference(len(output), None, None, 0.0, finite=False)
            else:
                difference = Difference(len(output), None, int(wanted[-1]), float(margins[-1]))
        return RequestCheck(equal, tied, difference, tuple(far))

    def choose(self, decoded: Decoded, tolerance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples after the prompt, and after each output token.

        Returns:
          int32 tokens, NONFINITE where there is none; float32 margins by which they won; and whether the token that
          did come next is tied with them (False after the last); each [outputs + 1].
        """
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
        arguments = (padded, np.int32(len(tokens)), rows, sampling, following, np.float32(tolerance))
        if self._mesh is not None and spans_processes(self._mesh):
            arguments = jax.tree.map(functools.partial(replicated, mesh=self._mesh), arguments)
        wanted, margins, tied = self._choose(self._weights, *arguments)
        end = len(decoded.output_ids) + 1
        return np.asarray(wanted)[:end], np.asarray(margins)[:end], np.asarray(tied)[:end]


def _choose(
    step: Step,
    allocate: Callable[[int, int], Caches],
    weights: list[Array],
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
    rows: Int32[Array, "n"],
    sampling: SamplingRows,
    following: Int32[Array, "n"],
    tolerance: Float[Array, ""],
) -> tuple[Int32[Array, "n"], Float[Array, "n"], Bool[Array, "n"]]:
    """Samples at `rows`, and again with the logits of the tokens that did follow raised by the tolerance, as if each
    had moved by half of it, all others down."""
    logits, _ = run_sequence(step, weights, allocate, tokens, num_tokens, rows)
    wanted, margins = sample(logits, sampling)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    chosen, _ = sample(logits.at[row, following].add(tolerance), sampling)
    return wanted, margins, chosen == following
