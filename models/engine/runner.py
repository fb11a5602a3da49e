"""Runs planned steps on the device: packs their metadata, compiles each shape once, and keeps the cache in place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from models.decoder import Caches, Decoder, over_mesh, specs_of, split_model, with_settings
from models.decoder.caches import cache_spec
from models.decoder.mesh import DATA, cache_partition
from models.engine.config import Bucket, RunnerConfig
from models.engine.distributed.processes import Processes
from models.engine.group_sizes import GroupSizes
from models.engine.kv_transfer.cached_pages import (
    RowFormat,
    digest_of,
    read_rows,
    warm_up_rows,
    write_layer,
    write_rows,
)
from models.engine.kv_transfer.split_rows import SplitRows
from models.engine.speculation.step import (
    SpeculativeState,
    allocate_state,
    check_trees,
    proposer_sizes,
    read_tokens,
    run_speculative_step,
    state_partition,
)
from models.engine.step.layered import LayeredStep, OnLayer, copying_rows
from models.engine.step.packed import PackedStep
from models.engine.step.plain import run_step
from models.engine.step.plan import RowTokens, StepPlan
from pallas_attn import compile_ahead

GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Operations that XLA launches as CUDA graphs, unless XLA_FLAGS say otherwise. Loops are not among its defaults, and
without them the host would wait for the device in every layer of a step with prompts, to learn how many pieces of a
cached prefix to read."""


SIDE_BY_SIDE: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""More options for steps of up to `SIDE_BY_SIDE_TOKENS` prompt tokens on one device. Kernels whose arrays do not depend
on each other run side by side in their graph: a router beside the shared experts, a latent's norm beside the queries,
rows that decode beside chunks. One sequence's step of DeepSeek-V2-Lite takes 2.5 ms in place of 2.8, that of 64
sequences 10.4 in place of 10.8 (H200; benchmarks/log/100), and one of 48 and of 464 prompt tokens 17.7 in place of 19.3
(H100; benchmarks/log/114). On a mesh collectives would have no order."""

SIDE_BY_SIDE_TOKENS = 512
"""Arrays of activations share less memory then, 0.16 GB in place of 0.09 with so many tokens of DeepSeek-V2-Lite, and
more with more tokens. Larger steps were not measured."""

WITH_PROMPTS: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""More options for those of these steps that have prompts. XLA joins the weights of two products of the same rows. With
few rows the product's own kernel reads both; with more they are copied together before, in every layer, and side by
side the copies of all layers are made early: 0.53 GB in place of 0.16, and 2% of a step (H100; benchmarks/log/114)."""


WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""More options for steps of more prompt tokens, on one device: their products are cuBLAS's. Else XLA compiles and times
hundreds of candidates in Triton, which take half of the processor time of an engine's start, and are no faster: a step
of 4,096 tokens takes 48.8 ms in place of 49.0, one with 64 rows that decode 47.7 in place of 49.4 (DeepSeek-V2-Lite,
H100; benchmarks/log/115)."""

LAYERS_AT_ONCE = 8
"""Layers of a program, at most, of steps of more than `SIDE_BY_SIDE_TOKENS` prompt tokens: XLA's time grows with them,
and pieces that are alike are compiled once. Shorter steps stay whole: several programs with other weights each take the
host 13 ms to start in place of 4, where a step takes 16 (DeepSeek-V2-Lite, H100; benchmarks/log/115)."""


MESH_OPTIONS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1"}
"""More options for steps on a mesh. Between two collectives of a layer with experts there is little but a condition,
for which XLA makes no graph by itself: the host would read it in every layer and start what follows. Prefill of two
and four data ranks is 1.17 and 1.19 times as fast (DeepSeek-V2-Lite, H100; benchmarks/log/107)."""


def gpu_options(bucket: Bucket | None = None, *, on_mesh: bool = False) -> dict[str, str | bool]:
    """Returns the options for a bucket, `GPU_OPTIONS` if it is None, but those that XLA_FLAGS set, which options of a
    compilation would override.

    Raises:
      ValueError: XLA_FLAGS cannot be parsed.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA takes anything else for the name of a file with flags
        flags = Path(flags).read_text(encoding="utf-8")
    given = {flag.lstrip("-").partition("=")[0] for flag in shlex.split(flags)}
    if on_mesh:
        options = GPU_OPTIONS | MESH_OPTIONS
    elif bucket is None:
        options = GPU_OPTIONS
    elif bucket.prefill_tokens <= SIDE_BY_SIDE_TOKENS:
        options = GPU_OPTIONS | SIDE_BY_SIDE | (WITH_PROMPTS if bucket.prefill_tokens else {})
    else:
        options = GPU_OPTIONS | WITHOUT_TRITON
    return {name: value for name, value in options.items() if name not in given}


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of a launched step, on the device.

    Attributes:
      plans: the launched plans, one for each data rank; None for ranks that had nothing to do.
      tokens: int32, sampled tokens of each rank, NONFINITE where logits were: decode rows of the bucket first, then
        prefill rows.
      bucket: the bucket it was padded to.
      logits: float32 [prefill tokens, V] of each rank, of a bucket with all_logits; else None.
      speculates: whether `tokens` are those of a step that may have drafts, see `speculative_step`.
      read: waits for tokens or logits and copies them to the host.
    """

    plans: tuple[StepPlan | None, ...]
    tokens: Int32[Array, "n"]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None
    speculates: bool = False
    read: Callable[[Array], np.ndarray] = np.asarray

    def sampled(self) -> list[RowTokens]:
        """Reads the tokens of each of the plans' `sampling_rows`, rank by rank, waiting for the device."""
        of_ranks = self.read(self.tokens).reshape(len(self.plans), -1)
        ranks = zip(self.plans, of_ranks, strict=True)
        return [row for plan, tokens in ranks if plan is not None for row in self._sampled_by(plan, tokens)]

    def _sampled_by(self, plan: StepPlan, tokens: Int32[np.ndarray, "n"]) -> list[RowTokens]:
        num_decode = len(plan.decode)
        if self.speculates:
            decode, prefill = read_tokens(tokens, self.bucket, num_decode)
        else:
            each = [RowTokens([token]) for token in tokens.tolist()]
            decode, prefill = each[:num_decode], each[self.bucket.decode_rows :]
        return [*decode, *(prefill[i] for i, row in enumerate(plan.prefill) if row.samples)]


class Runner:
    """Owns the weights, the caches and the last sampled token of every running request, all on the device; with
    speculation also what the proposer needs. A model on a mesh runs inside one `jax.shard_map` around the step; each
    rank along its data axis has rows, tokens and pages of its own."""

    def __init__(self, model: Decoder, config: RunnerConfig, processes: Processes | None = None):
        if config.batch_invariant:
            model = with_settings(model, dataclasses.replace(model.settings, batch_invariant=True))
        self._config, self._mesh, self._processes = config, model.mesh, processes
        self._model_config, self._index_topk = model.config, model.settings.index_topk
        self._num_ranks = 1 if model.mesh is None else model.mesh.shape[DATA]
        self._placement = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec(DATA))
        pages = config.layer_pages(model.config.num_hidden_layers)
        cache = (config.page_size, config.cache_dtype, config.kv_scales)
        self._specs = model.cache_specs(pages, *cache)
        self._make_state: Callable[[], tuple[Caches, Any]] = lambda: (
            model.allocate_caches(pages, *cache),
            self._make_last_tokens(),
        )
        if model.mesh is not None:
            rows: Any = PartitionSpec(DATA) if config.speculate is None else state_partition()
            self._state_specs = cache_partition(model.part, self._specs), rows
            self._make_state = jax.jit(over_mesh(self._make_state, model.mesh, (), self._state_specs))
        self._split_rows = None if model.mesh is None else SplitRows(model.config, model.mesh)
        self._step, self._weights = split_model(model)
        self._model = model
        # Drafts are proposed and verified around whole steps; on a mesh, what layers take would have to be known from
        # outside device by device; and steps with the same bits in any company are one program, which decodes, too.
        stays_whole = config.speculate is not None or model.mesh is not None or config.batch_invariant
        num_pieces = -(-len(self._specs) // LAYERS_AT_ONCE)
        self._long = None if stays_whole or num_pieces == 1 else LayeredStep(model, config, num_pieces)
        self._layered: LayeredStep | None = None
        self._copied: set[Bucket] = set()
        self._function: Any = run_step
        if config.speculate is not None:
            self._proposer_sizes = proposer_sizes(config, model.config.num_hidden_layers, model.mesh)
            config.speculate.proposer.check(model.config, self._proposer_sizes)
            if config.speculate.proposer.makes_trees:
                check_trees(model.config, model.settings, model.contexts)
            self._function = run_speculative_step
        self._compiled: dict[Bucket, Any] = {}
        self._num_steps = 0
        self.compile_s = 0.0
        self._caches: Caches = ()
        self._last_tokens: Int32[Array, "slots"] | SpeculativeState | None = None
        self._allocate()

    @property
    def num_compilations(self) -> int:
        """Buckets compiled so far."""
        return len(self._compiled)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all layers' caches and of what speculation keeps beside them, on each device."""
        kept = () if self._config.speculate is None else jax.tree.leaves(jax.eval_shape(self._make_last_tokens))
        return sum(spec.num_bytes for spec in self._specs) + sum(array.size * array.dtype.itemsize for array in kept)

    def reset(self) -> None:
        """Gives up the caches, which may be gone after a step was cut short; the next step starts with empty ones. Asks
        nothing of the device, so that it works where the device does not."""
        self._last_tokens, self._caches = None, ()

    def _allocate(self) -> Int32[Array, "slots"] | SpeculativeState:
        """Allocates empty caches if there are none; returns the last sampled tokens, with what belongs to them."""
        if self._last_tokens is None:
            self._caches = ()  # memory may not hold both
            self._caches, self._last_tokens = self._make_state()
        return self._last_tokens

    def _make_last_tokens(self) -> Int32[Array, "slots"] | SpeculativeState:
        speculate = self._config.speculate
        if speculate is None:
            return jnp.zeros((self._config.max_num_seqs,), jnp.int32)
        return allocate_state(speculate.proposer, self._proposer_sizes)

    def row_format(self, group: GroupSizes) -> RowFormat:
        """Format of a row of a cache group."""

        def shape(a: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            of_device = tuple(a.shape[2 if group.head_wise else 1 :])
            return of_device if self._split_rows is None else self._split_rows.shape(of_device, group.head_wise)

        paged = {
            f"{layer}.{name}": (shape(a), np.dtype(a.dtype))
            for layer in group.layers
            for name, a in self._specs[layer].arrays.items()
            if len(a.shape) > 2  # static scales have no pages
        }
        return RowFormat(group.num_heads, paged)

    def read_rows(self, group: GroupSizes, rows: Int32[np.ndarray, "n"], rank: int = 0) -> dict[str, np.ndarray]:
        """Copies rows of a cache group of a data rank to the host, with what all launched steps write to them.

        Returns:
          [n, ...] by layer and array, as `row_format` has them.
        """
        self._allocate()
        if self._split_rows is not None:
            return self._split_rows.read(self._caches, group.layers, group.head_wise, rows, rank)
        return read_rows(self._caches, group.layers, group.head_wise, rows)

    def write_rows(
        self, group: GroupSizes, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray], rank: int = 0
    ) -> None:
        """Writes rows of a cache group of a data rank, before anything that later steps do; contents as `read_rows`
        returns them.

        If this raises, the caches may be gone: call `reset`.
        """
        self._allocate()
        of_rows = (self._caches, group.layers, group.head_wise, rows, contents)
        split = self._split_rows
        self._caches = write_rows(*of_rows) if split is None else split.write(*of_rows, rank)

    def write_layer(
        self, group: GroupSizes, layer: int, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
    ) -> None:
        """Writes rows of one layer of a cache group, as `write_rows`; contents by array.

        If this raises, the caches may be gone: call `reset`.
        """
        self._allocate()
        cache = write_layer(self._caches[layer], group.head_wise, rows, contents)
        self._caches = (*self._caches[:layer], cache, *self._caches[layer + 1 :])

    def cache_format(self) -> dict[str, Any]:
        """Facts that tell caches apart whose contents must not be exchanged, by name: the model's configuration, shapes
        and dtypes of its pages, static scales, another number of keys that tokens choose, and a digest of the extremes
        of every weight. They are the same on any mesh."""
        scales = self._config.kv_scales
        dtype = self._config.cache_dtype or self._model.embed_tokens.dtype
        pages = functools.partial(cache_spec, self._model_config, 1, self._config.page_size, dtype, scales)
        arrays = {
            str(layer): {name: [list(a.shape[1:]), a.dtype.name] for name, a in pages(layer=layer).arrays.items()}
            for layer in range(len(self._specs))
        }
        extremes = jax.jit(lambda weights: [_extremes(weight) for weight in weights])(self._weights)
        return {
            "page_size": self._config.page_size,
            **{f"config.{name}": value for name, value in dataclasses.asdict(self._model_config).items()},
            "arrays": arrays,
            "index_topk": self._index_topk,
            "kv_scales": None if scales is None else digest_of([scales.k, scales.v]),
            "weights": digest_of(jax.device_get(extremes)),
        }

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Every bucket that a step can fall into."""
        return self._config.buckets(all_logits)

    def bucket_of(self, plans: Sequence[StepPlan | None], all_logits: bool = False) -> Bucket:
        """The smallest bucket that holds the step of every rank."""
        some = [plan for plan in plans if plan is not None]
        num_decode = max(len(plan.decode) for plan in some)
        num_prefill = max(sum(row.num_tokens for row in plan.prefill) for plan in some)
        num_drafts = max(plan.num_drafts for plan in some)
        return next(
            bucket
            for bucket in self.buckets(all_logits)
            if num_decode <= bucket.decode_rows and num_prefill <= bucket.prefill_tokens
            if num_drafts <= bucket.num_drafts
        )

    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Compiles the buckets that are not yet compiled, each beside the tracing and the compiling of those after it,
        since XLA spends most of its time on one core, and their kernels in threads of their own. On a GPU every
        compiled one is then run without rows, twice: the first run loads its kernels, the second records them. That
        comes last, because XLA drops the CUDA graphs of all programs whenever it makes another.
        """
        new = [bucket for bucket in buckets if bucket not in self._compiled]
        if not new:
            return
        with contextlib.nullcontext() if self._processes is None else self._processes.busy(), self._timing():
            self._compiled |= self._compile({bucket: self._cut(bucket) for bucket in new})
            self._warm_up()

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.compile_s += time.perf_counter() - began

    def _cut(self, bucket: Bucket) -> LayeredStep | None:
        """Returns the way to cut the steps of a bucket into programs; None if they are one."""
        return self._long if bucket.prefill_tokens > SIDE_BY_SIDE_TOKENS else None

    def _compile(self, new: Mapping[Bucket, LayeredStep | None]) -> dict[Bucket, Any]:
        """Compiles steps as they are cut; a step is called as (weights, caches, last tokens, packed)."""
        last_tokens = self._allocate()
        on_gpu, on_mesh = _is_on_gpu(last_tokens), self._mesh is not None
        with ThreadPoolExecutor() as threads, compile_ahead(threads):
            compiled: dict[Bucket, Callable[[], Any]] = {}
            for bucket, layered in new.items():
                options = gpu_options(bucket, on_mesh=on_mesh) if on_gpu else None

                def start(lowered: jax.stages.Lowered, options: Any = options) -> Future[Any]:
                    return threads.submit(lowered.compile, options)

                if layered is None:
                    compiled[bucket] = start(self._lower(bucket, last_tokens)).result
                else:
                    with _without_source_lines():
                        compiled[bucket] = layered.compile(bucket, self._weights, self._caches, last_tokens, start)
            return {bucket: result() for bucket, result in compiled.items()}

    def _warm_up(self) -> None:
        """Runs all that is compiled twice without rows, on a GPU."""
        if _is_on_gpu(self._allocate()):
            of_layers = {} if self._layered is None else self._layered.compiled
            for bucket, step in [*self._compiled.items(), *of_layers.items()] * 2:
                self._run_idle(bucket, step)

    def cut_steps(self, num_pieces: int) -> None:
        """Makes `launch` with `on_layer` start steps in so many pieces, at most one a layer."""
        if self._layered is None or self._layered.num_pieces != num_pieces:
            has_programs = self._long is not None and self._long.num_pieces == num_pieces
            self._layered = self._long if has_programs else LayeredStep(self._model, self._config, num_pieces)
            self._copied = set()

    def compile_layers(self, buckets: Sequence[Bucket]) -> LayeredStep:
        """Compiles those of the buckets that have prompts for `launch` with `on_layer`, and the copies of rows; as
        `compile`, it has a GPU run everything twice in the end."""
        layered, groups = self._layered, self._config.groups or ()
        if layered is None:
            raise ValueError("buckets: expected steps that `cut_steps` has cut")
        new = [bucket for bucket in buckets if bucket.prefill_tokens and bucket not in self._copied]
        if new:
            with self._timing():
                self._compile({bucket: layered for bucket in new if bucket not in layered.compiled})
                warm_up_rows(self._caches, groups, layered.pieces)
                self._warm_up()
                self._copied |= {*new}
        return layered

    def _lower(self, bucket: Bucket, last_tokens: Int32[Array, "slots"] | SpeculativeState) -> jax.stages.Lowered:
        """Traces and lowers the step of a bucket; on a mesh, what each device does of it."""
        function = functools.partial(self._function, self._step, self._config, bucket)
        if self._mesh is not None:
            of_ranks = PartitionSpec(DATA)
            arguments = (specs_of(self._all_weights()), *self._state_specs, of_ranks)
            if self._processes is not None:  # each reads the tokens of all ranks
                function = _gathering(function)
            read = of_ranks if self._processes is None else PartitionSpec()
            function = over_mesh(function, self._mesh, arguments, (read, read, *self._state_specs))
        size = self._num_ranks * PackedStep.size(self._config, bucket)
        packed = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._placement)
        donating = jax.jit(function, donate_argnums=(1, 2))
        with _without_source_lines():
            return donating.lower(self._all_weights(), self._caches, last_tokens, packed)

    def run_idle(self, bucket: Bucket) -> None:
        """Runs a compiled bucket without rows and waits for it, which leaves caches and tokens as they are."""
        self._run_idle(bucket, self._compiled[bucket])

    def _run_idle(self, bucket: Bucket, step: Any) -> None:
        jax.block_until_ready(self._run(step, self._pack(bucket, [None] * self._num_ranks)))

    def launch(
        self,
        plans: Sequence[StepPlan | None],
        all_logits: bool = False,
        *,
        rows: Sequence[np.ndarray] = (),
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        """Starts a step and returns without waiting for it. Steps run in the order they are launched.

        If this raises, the caches may be gone: call `reset`.

        Args:
          plans: of each data rank; None for one without rows. One of them has some.
          all_logits: whether the logits of all prefill tokens are wanted.
          rows: int32 of each cache group, that are to be copied layer by layer.
          on_layer: takes those copies; None for a step that is one program. On one device, without drafts, after
            `cut_steps`.
        """
        bucket = self.bucket_of(plans, all_logits)
        if on_layer is not None:
            return self._launch_layers(plans, bucket, rows, on_layer)
        self.compile([bucket])
        if self._processes is None:
            tokens, logits = self._run(self._compiled[bucket], self._pack(bucket, plans))
            read: Callable[[Array], np.ndarray] = np.asarray
        else:
            packed = self._pack(bucket, plans)
            read = self._processes.announce(f"step {self._num_steps}", repr(bucket).encode(), packed.tobytes())
            with self._processes.blamed():
                tokens, logits = self._run(self._compiled[bucket], packed)
        self._num_steps += 1
        tokens.copy_to_host_async()
        return StepResult(tuple(plans), tokens, bucket, logits, self._config.speculate is not None, read)

    def _launch_layers(
        self,
        plans: Sequence[StepPlan | None],
        bucket: Bucket,
        rows: Sequence[np.ndarray],
        on_layer: OnLayer,
    ) -> StepResult:
        """Starts a step as programs of its layers, which `on_layer` is told of."""
        step = self.compile_layers([bucket]).compiled[bucket]
        copying = copying_rows(rows, self._config.groups or (), on_layer)
        tokens, logits = self._run(functools.partial(step, on_piece=copying), self._pack(bucket, plans))
        self._num_steps += 1
        tokens.copy_to_host_async()
        return StepResult(tuple(plans), tokens, bucket, logits)

    def _all_weights(self) -> Any:
        """The target's weights; with speculation, the proposer's beside them, which it may exchange between steps."""
        speculate = self._config.speculate
        return self._weights if speculate is None else (self._weights, speculate.proposer.weights)

    def _pack(self, bucket: Bucket, plans: Sequence[StepPlan | None]) -> Int32[np.ndarray, "n"]:
        idle = StepPlan((), (), self._config.empty_tables)
        of_ranks = [PackedStep.pack(self._config, bucket, idle if plan is None else plan) for plan in plans]
        return of_ranks[0] if len(of_ranks) == 1 else np.concatenate(of_ranks)

    def _run(self, step: Callable[..., Any], packed: Int32[np.ndarray, "n"]) -> tuple[Array, Array | None]:
        """Starts a compiled step; returns its sampled tokens, and its logits if the bucket has them."""
        if self._placement is None or self._placement.is_fully_addressable:
            on_devices = jax.device_put(packed, self._placement)
        else:  # `jax.device_put` would compare what processes have, by a collective operation
            on_devices = jax.make_array_from_callback(packed.shape, self._placement, packed.__getitem__)
        last_tokens = self._allocate()
        tokens, logits, self._caches, self._last_tokens = step(
            self._all_weights(), self._caches, last_tokens, on_devices
        )
        return tokens, logits


@contextlib.contextmanager
def _without_source_lines() -> Iterator[None]:
    """Leaves the lines of Python out of what is lowered. XLA writes down for each kernel all those that made it, which
    takes seconds of a step with prompts; the names of operations stay."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _is_on_gpu(arrays: Any) -> bool:
    return all(device.platform == "gpu" for device in jax.tree.leaves(arrays)[0].devices())


def _extremes(weight: Array) -> Array:
    """Least and greatest value of a weight, or 0 if that is more extreme: a slice of it may be padded with zeros."""
    return jnp.stack([jnp.min(weight, initial=0), jnp.max(weight, initial=0)])


def _gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose tokens and logits are those of all data ranks."""

    def gathered(*arguments: Any) -> tuple[Any, ...]:
        tokens, logits, *state = function(*arguments)
        everyone = functools.partial(jax.lax.all_gather, axis_name=DATA, tiled=True)
        return everyone(tokens), None if logits is None else everyone(logits), *state

    return gathered
