"""The programs of a step, and their compilation.

    propose    drafts of the decode rows; only with speculation, in steps with drafts
    forward    logits of the rows that sample; updates the caches
    score      log probabilities of prompt tokens; only in steps with a request that wants them
    sample     tokens, from the logits and from the token masks that the host computes

`forward` is compiled for each bucket (padded shape of a step). The other programs depend on fewer sizes, so several
buckets share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import config as jax_config  # JAX has no public setting of this limit for one thread
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from pallas_attn import compile_ahead
from pallas_attn.models.decoder import Caches, Decoder, over_mesh, shapes_of, specs_of, split_model, split_module
from pallas_attn.models.decoder.mesh import DATA
from pallas_attn.models.engine.compile_options import gpu_options
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.logit_edits import EditState
from pallas_attn.models.engine.speculation import step as speculative
from pallas_attn.models.engine.speculation.step import Drafts, SpeculativeState, has_drafts
from pallas_attn.models.engine.step import plain
from pallas_attn.models.engine.step.layered import LayeredStep
from pallas_attn.models.engine.step.packed import PackedStep, RowParameters
from pallas_attn.models.engine.step.plain import StepOutputs

type OnCompiled = Callable[[int, int], object]
"""Function that receives the number of compiled buckets and the number of all buckets to compile."""


type ProgramName = Literal["propose", "forward", "score", "sample"]


class SharedProgram(NamedTuple):
    """Key of a compiled program that several buckets may share.

    Attributes:
      name: name of the program.
      bucket: bucket with the sizes that the program depends on; the other sizes are 0.
    """

    name: ProgramName
    bucket: Bucket


_OF_RANKS = PartitionSpec(DATA)
"""Partition of arrays with a part for each data rank."""

_READ: Any = object()
"""Stands for the partition of an array that the host reads: `_OF_RANKS`; with several processes `PartitionSpec()`, so
that every process has the whole array."""


class RunnerState(NamedTuple):
    """Arrays of a runner that programs take and return.

    Attributes:
      caches: caches of all layers.
      last_tokens: last sampled token of each request slot, or a `SpeculativeState`.
      edits: state of the request slots for edits of logits.
      no_masks: zeros by shape; the argument of steps in which no row has a mask.
    """

    caches: Caches
    last_tokens: Int32[Array, "slots"] | SpeculativeState
    edits: EditState
    no_masks: Mapping[tuple[int, int], Array]


class StepCompiler:
    """Compiles the programs of steps, and stores the compiled programs.

    On a mesh the programs run inside one `jax.shard_map`.

    Attributes:
      forward: forward programs by bucket.
      shared: the other programs.
      placement: placement of arrays with a part for each data rank; None for one device.
      num_ranks: number of data ranks.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, state_specs: tuple[Any, Any, Any], *, gathers: bool):
        """Prepare the functions of the programs; nothing is compiled.

        Args:
          model: the model.
          config: sizes for which the runner compiles.
          state_specs: partitions of caches, last tokens and the state of edits; None without a mesh.
          gathers: whether every device gets what the host reads of all data ranks; needed for several processes.
        """
        self._config, self._mesh, self._state_specs, self._gathers = config, model.mesh, state_specs, gathers
        self.num_ranks = 1 if model.mesh is None else model.mesh.shape[DATA]
        self.placement = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec(DATA))
        self._weights: list[Array] | None
        self._step, self._weights = split_model(model)
        self._rebuild, _ = split_module(model)
        self._model = shapes_of(model)  # a reference to replaced weights would keep their memory
        self.forward: dict[Bucket, Any] = {}
        self.shared: dict[SharedProgram, Any] = {}

    @staticmethod
    def shapes(state: RunnerState) -> RunnerState:
        """Return shapes, dtypes and shardings of the arrays of a runner. `compile` makes the same programs from them,
        also in another thread while steps replace the arrays."""

        def shape(array: Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding if array.committed else None)

        return jax.tree.map(shape, state)

    def mask_shape(self, bucket: Bucket) -> tuple[int, int]:
        """Shape of the bit masks of allowed tokens of all data ranks: one mask for each row of logits."""
        return self.num_ranks * self._config.num_logits(bucket), -(-self._model.config.vocab_size // 32)

    def compile(
        self, new: Mapping[Bucket, LayeredStep | None], state: RunnerState, on_compiled: OnCompiled | None = None
    ) -> dict[Bucket, Any]:
        """Compile the programs of each bucket. Return the forward programs: one program per bucket, or several programs
        if a `LayeredStep` is given. Store the other programs in `shared`.

        `state` may be the result of `shapes`. Two threads may call this method at the same time."""
        on_gpu, on_mesh = is_on_gpu(self.weights), self._mesh is not None
        report = on_compiled or _ignore
        report(0, len(new))
        with ThreadPoolExecutor() as threads, compile_ahead(threads):

            def start(bucket: Bucket, lowered: jax.stages.Lowered) -> Future[Any]:
                return threads.submit(lowered.compile, gpu_options(bucket, on_mesh=on_mesh) if on_gpu else None)

            results: dict[Bucket, Callable[[], Any]] = {}
            shared: dict[SharedProgram, Future[Any]] = {}
            for bucket, layered in new.items():
                if layered is None:
                    results[bucket] = start(bucket, self.lower("forward", bucket, state)).result
                else:
                    with _without_source_lines():
                        inputs, start_part = (
                            (self.weights, state.caches, state.last_tokens),
                            functools.partial(start, bucket),
                        )
                        results[bucket] = layered.compile(bucket, *inputs, start_part)
                for program in self._all_shared(bucket):
                    if program not in self.shared and program not in shared:
                        shared[program] = start(program.bucket, self.lower(*program, state))
            compiled: dict[Bucket, Any] = {}
            for bucket, result in results.items():
                compiled[bucket] = result()
                if len(compiled) == len(new):
                    self.shared |= {program: future.result() for program, future in shared.items()}
                report(len(compiled), len(new))
            return compiled

    def _all_shared(self, bucket: Bucket) -> list[SharedProgram]:
        """Return the programs of steps of a bucket besides `forward`."""
        programs = [self.shared_program("propose", bucket)] if has_drafts(bucket) else []
        if bucket.prefill_tokens and not bucket.skips_layers:
            programs.append(self.shared_program("score", bucket))
        return [*programs, self.shared_program("sample", bucket)]

    def shared_program(self, name: ProgramName, bucket: Bucket) -> SharedProgram:
        """Return the key of a program of a bucket in `shared`.

        Without speculation, `sample` depends only on the number of rows. With speculation it depends on all
        sizes of the bucket, because it updates the proposer's state.
        """
        match name:
            case "propose":
                return SharedProgram(name, Bucket(bucket.decode_rows, 0, num_drafts=bucket.num_drafts))
            case "score":
                return SharedProgram(name, Bucket(0, bucket.prefill_tokens))
            case _ if self._config.speculate is None:
                return SharedProgram(name, Bucket(self._config.num_rows(bucket), 0))
            case _:
                return SharedProgram(name, dataclasses.replace(bucket, all_logits=False, skips_layers=False))

    def lower(self, name: ProgramName, bucket: Bucket, state: RunnerState) -> jax.stages.Lowered:
        """Trace and lower a program. On a mesh, each device runs it on its part of the arrays.

        Args:
          name: name of the program.
          bucket: sizes of the program, from `shared_program`; for "forward" the bucket of the step.
          state: arrays of the runner.
        """
        config, last_tokens = self._config, state.last_tokens
        drafting = config.speculate is not None
        caches, rows, edits = self._state_specs
        own: Any = (config,) if name == "sample" and not drafting else (config, bucket)
        arguments: tuple[Any, ...]
        match name:
            case "propose":
                function, donated = speculative.propose, (1,)
                arguments = self.proposer_weights, last_tokens, self._packed_shape(bucket)
                specs = (rows, _OF_RANKS), (_OF_RANKS, _READ, rows)
            case "forward":
                function, donated = speculative.forward if drafting else plain.forward, (1,)
                own = self._step, *own
                packed, drafts = self._packed_shape(bucket), self._draft_shapes(bucket)
                arguments = self.weights, state.caches, last_tokens, packed, drafts
                outputs = StepOutputs(*[_OF_RANKS] * len(StepOutputs._fields))._replace(prompt_logits=_READ)
                specs = (caches, rows, _OF_RANKS, _OF_RANKS), (outputs, caches)
            case "score":
                function, donated, own = plain.score_prompts, (), (self._logits_of, config)
                tokens = self._shape(jnp.int32, bucket.prefill_tokens)
                arguments = self.weights, self._hidden_shape(bucket.prefill_tokens), tokens
                specs = (_OF_RANKS, _OF_RANKS), _READ
            case "sample":
                function, donated = speculative.sample if drafting else plain.sample, (1, 2, 3)
                moved, of_moved = (state.caches, caches) if self.moves_tokens(bucket) else ((), ())
                shapes, masks = self._output_shapes(bucket), state.no_masks[self.mask_shape(bucket)]
                inputs = shapes, self._draft_shapes(bucket), masks
                arguments = self.proposer_weights, moved, last_tokens, state.edits, *inputs
                specs = (of_moved, rows, edits, *[_OF_RANKS] * 3), (_READ, _READ, of_moved, rows, edits)
        of_program = functools.partial(function, *own)
        if self._mesh is not None:
            of_arguments, of_results = specs
            if self._gathers:
                of_program = _gathering(of_program, of_results)
            read = PartitionSpec() if self._gathers else _OF_RANKS
            of_results = jax.tree.map(lambda spec: read if spec is _READ else spec, of_results)
            of_program = over_mesh(of_program, self._mesh, (specs_of(arguments[0]), *of_arguments), of_results)
        with _without_source_lines():
            return jax.jit(of_program, donate_argnums=donated).lower(*arguments)

    def _shape(self, dtype: Any, rows: int, *dims: int) -> jax.ShapeDtypeStruct:
        """Shape of an argument of a program with `rows` rows for each data rank."""
        return jax.ShapeDtypeStruct((self.num_ranks * rows, *dims), dtype, sharding=self.placement)

    def _packed_shape(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        return self._shape(jnp.int32, PackedStep.size(self._config, bucket))

    def _hidden_shape(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return self._shape(self._model.embed_tokens.dtype, num_tokens, self._model.hidden_width)

    def _draft_shapes(self, bucket: Bucket) -> Drafts | None:
        """Shapes of the result of `propose`; None for a bucket without drafts."""
        if not has_drafts(bucket):
            return None
        drafts: Any = self._shape(jnp.int32, bucket.decode_rows, bucket.num_drafts)
        counts: Any = self._shape(jnp.int32, bucket.decode_rows)
        is_tree = self._config.speculate is not None and self._config.speculate.proposer.makes_trees
        return Drafts(drafts, counts, drafts if is_tree else None)

    def _output_shapes(self, bucket: Bucket) -> StepOutputs:
        """Shapes of the outputs of `forward` that `sample` needs."""
        config, num_logits = self._config, self._config.num_logits(bucket)
        logits = self._shape(jnp.float32, num_logits, self._model.config.vocab_size)
        if config.speculate is None:
            return StepOutputs(self._shape(jnp.int32, RowParameters.size(config, num_logits)), logits)
        packed = self._packed_shape(bucket)
        if not config.speculate.proposer.needs_hidden:
            return StepOutputs(packed, logits)
        num_decode = bucket.decode_rows * (1 + bucket.num_drafts)
        hidden = self._hidden_shape(bucket.prefill_tokens) if bucket.prefill_tokens else None
        return StepOutputs(packed, logits, hidden, self._hidden_shape(num_decode))

    def moves_tokens(self, bucket: Bucket) -> bool:
        """Whether `sample` moves the cache entries of accepted drafts, which it does if the drafts form trees."""
        speculate = self._config.speculate
        return speculate is not None and speculate.proposer.makes_trees and has_drafts(bucket)

    def _logits_of(self, weights: Any, hidden: Array) -> Array:
        """Return the logits of hidden states of `Decoder.with_hidden`."""
        return self._rebuild(weights).hidden_logits(hidden)

    @property
    def weights(self) -> list[Array]:
        """The model's weights. They may be replaced by arrays of equal shapes, dtypes and shardings.

        Raises:
          RuntimeError: the weights were released, and no new ones were set.
        """
        if self._weights is None:
            raise RuntimeError(
                "weights: an exception interrupted update_weights(in_place=True), so some weights are lost; call"
                " update_weights again"
            )
        return self._weights

    @weights.setter
    def weights(self, weights: list[Array]) -> None:
        self._weights = weights

    def take_weights(self) -> list[Any]:
        """Return the weights and give up the reference to them; an empty list if they were released before."""
        taken, self._weights = self._weights, None
        return taken or []

    @property
    def model(self) -> Decoder:
        """The model with its present weights."""
        return self._rebuild(self.weights)

    @property
    def proposer_weights(self) -> Any:
        """Weights of the proposer; () without speculation. A proposer may replace its weights between steps."""
        return () if self._config.speculate is None else self._config.speculate.proposer.weights


@contextlib.contextmanager
def _without_source_lines() -> Iterator[None]:
    """Lower without Python source locations, in this thread. XLA records the locations of every kernel, which takes
    seconds for a step with prompts. Names of operations are not affected."""
    with jax_config.traceback_in_locations_limit(0):
        yield


def _ignore(num_compiled: int, num_buckets: int) -> None:
    """`OnCompiled` that does nothing."""


def is_on_gpu(arrays: Any) -> bool:
    return all(device.platform == "gpu" for device in jax.tree.leaves(arrays)[0].devices())


def _gathering(function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """Make a program return, on every device, the results of all data ranks where `specs` has `_READ`."""
    everyone = functools.partial(jax.lax.all_gather, axis_name=DATA, tiled=True)

    def gathered(*arguments: Any) -> Any:
        results = function(*arguments)
        return jax.tree.map(lambda spec, x: jax.tree.map(everyone, x) if spec is _READ else x, specs, results)

    return gathered
