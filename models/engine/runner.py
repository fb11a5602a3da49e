"""The runner: owns weights and caches on the device, compiles each step shape once, and launches planned steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from pallas_attn import compile_ahead
from pallas_attn.models.decoder import Caches, Decoder, over_mesh, specs_of, split_model, split_module, with_settings
from pallas_attn.models.decoder.mesh import DATA, cache_partition
from pallas_attn.models.engine.compile_options import CONCURRENT_TOKENS, MAX_LAYERS_PER_PROGRAM, gpu_options
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.distributed.processes import Processes
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cache_rows import CacheRows
from pallas_attn.models.engine.kv_transfer.cached_pages import RowFormat, warm_up_rows
from pallas_attn.models.engine.logit_edits import EditState, pack_writes, write_size, write_slot
from pallas_attn.models.engine.request import RowFlags
from pallas_attn.models.engine.speculation.step import (
    SpeculativeState,
    allocate_state,
    check_trees,
    proposer_sizes,
    run_speculative_step,
    state_partition,
)
from pallas_attn.models.engine.step.layered import LayeredStep, OnLayer, copying_rows
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import run_step
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.step.result import StepResult

type OnCompiled = Callable[[int, int], object]
"""Function that receives the number of compiled buckets and the number of all buckets to compile."""


class Runner:
    """Owns the weights, the caches, and the last sampled token of every running request, all on the device. With
    speculation it also owns the proposer's state.

    A model on a mesh runs inside one `jax.shard_map` around the step. Each data rank has its own rows, tokens and
    pages.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, processes: Processes | None = None):
        """Allocate the caches; nothing is compiled.

        Raises:
          ValueError, NotImplementedError: the proposer does not support the model.
        """
        if config.batch_invariant:
            model = with_settings(model, dataclasses.replace(model.settings, batch_invariant=True))
        config = dataclasses.replace(config, max_logprobs=min(config.max_logprobs, model.config.vocab_size))
        self._config, self._mesh, self._processes = config, model.mesh, processes
        self._num_ranks = 1 if model.mesh is None else model.mesh.shape[DATA]
        self._placement = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec(DATA))
        self._step, self._weights = split_model(model)
        self._rebuild, _ = split_module(model)
        self._model = model
        self._prepare_state(model)
        self._rows = CacheRows(model, config, self._specs)
        self._prepare_programs(model)
        self._num_steps = 0
        self.compile_s = 0.0
        self._caches: Caches = ()
        self._last_tokens: Int32[Array, "slots"] | SpeculativeState | None = None
        self._edits: Any = None  # EditState
        self._no_masks: dict[int, Array] = {}
        self._write_slot: Any = None
        self._allocate()

    def _prepare_state(self, model: Decoder) -> None:
        """Set the shapes of the caches, and the function that allocates caches, last tokens and the state of edits."""
        config = self._config
        pages = config.layer_pages(model.config.num_hidden_layers)
        cache = (config.page_size, config.cache_dtype, config.kv_scales)
        self._specs = model.cache_specs(pages, *cache)
        self._make_state: Callable[[], tuple[Caches, Any, EditState]] = lambda: (
            model.allocate_caches(pages, *cache),
            self._make_last_tokens(),
            EditState.allocate(config.max_num_seqs, model.config.vocab_size),
        )
        if model.mesh is not None:
            rows: Any = PartitionSpec(DATA) if config.speculate is None else state_partition()
            self._state_specs = cache_partition(model.part, self._specs), rows, PartitionSpec(DATA)
            self._make_state = jax.jit(over_mesh(self._make_state, model.mesh, (), self._state_specs))

    def _prepare_programs(self, model: Decoder) -> None:
        """Choose the function of a step, and whether long steps are split into several programs."""
        config = self._config
        # One program per step in these cases: a proposer drafts and observes around the whole step; on a mesh the
        # layers' inputs would need shardings; batch-invariant steps must all be the same program; and layers that use
        # the caches of other layers must be in the same program.
        is_whole = config.speculate is not None or model.mesh is not None or config.batch_invariant
        is_whole = is_whole or not model.config.is_divisible
        num_programs = -(-len(self._specs) // MAX_LAYERS_PER_PROGRAM)
        self._long = None if is_whole or num_programs == 1 else LayeredStep(model, config, num_programs)
        self._layered: LayeredStep | None = None
        self._copied: set[Bucket] = set()  # buckets whose row copies are compiled
        self._compiled: dict[Bucket, Any] = {}
        self._function: Any = run_step
        if config.speculate is not None:
            self._proposer_sizes = proposer_sizes(config, model.config.num_hidden_layers, model.mesh)
            config.speculate.proposer.check(model.config, self._proposer_sizes)
            if config.speculate.proposer.makes_trees:
                check_trees(model.config, model.settings, model.contexts)
            self._function = run_speculative_step

    @property
    def num_compilations(self) -> int:
        """Number of compiled buckets."""
        return len(self._compiled)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all layers' caches and of the state of speculation, on each device."""
        state = () if self._config.speculate is None else jax.tree.leaves(jax.eval_shape(self._make_last_tokens))
        return sum(spec.num_bytes for spec in self._specs) + sum(array.size * array.dtype.itemsize for array in state)

    # --- caches

    def reset(self) -> None:
        """Drop the caches, which may be invalid after an interrupted step. The next step allocates empty caches. This
        call does not use the device, so it succeeds if the device has failed."""
        self._last_tokens, self._caches, self._edits, self._no_masks = None, (), None, {}

    def _allocate(self) -> Int32[Array, "slots"] | SpeculativeState:
        """Allocate empty caches if there are none. Return the last sampled tokens (with speculation its state)."""
        if self._last_tokens is None:
            self._caches, self._edits = (), None  # memory may not hold old and new caches together
            self._caches, self._last_tokens, self._edits = self._make_state()
            for num_rows in {self._config.num_rows(bucket) for bucket in self.buckets()}:
                self._no_masks[num_rows] = self._put(np.zeros(self._mask_shape(num_rows), np.uint32))
        return self._last_tokens

    def _mask_shape(self, num_rows: int) -> tuple[int, int]:
        """Shape of the bit masks of allowed tokens of all data ranks, with `num_rows` rows per rank."""
        return self._num_ranks * num_rows, -(-self._model.config.vocab_size // 32)

    def _put(self, array: np.ndarray) -> Array:
        """Copy an array to the devices, one part per data rank along axis 0."""
        if self._placement is None or self._placement.is_fully_addressable:
            return jax.device_put(array, self._placement)
        # `jax.device_put` would run a collective operation to compare the values of all processes
        return jax.make_array_from_callback(array.shape, self._placement, array.__getitem__)

    def _make_last_tokens(self) -> Int32[Array, "slots"] | SpeculativeState:
        speculate = self._config.speculate
        if speculate is None:
            return jnp.zeros((self._config.max_num_seqs,), jnp.int32)
        return allocate_state(speculate.proposer, self._proposer_sizes)

    def row_format(self, group: GroupSizes) -> RowFormat:
        """Return shapes and dtypes of one page row of a cache group."""
        return self._rows.row_format(group)

    def cache_format(self) -> dict[str, Any]:
        """Return facts by name. Two engines can exchange pages only if these facts are equal."""
        return self._rows.cache_format(self._model)

    def read_rows(self, group: GroupSizes, rows: Int32[np.ndarray, "n"], rank: int = 0) -> dict[str, np.ndarray]:
        """Copy page rows to the host. The copies include the writes of all steps that were launched before this call.

        Args:
          group: cache group of the rows.
          rows: indices of the page rows in the pool of the data rank.
          rank: data rank that owns the pool.

        Returns:
          Contents of the rows, [n, ...] by "layer.array". `row_format` describes one row.
        """
        self._allocate()
        return self._rows.read(self._caches, group, rows, rank)

    def write_rows(
        self, group: GroupSizes, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray], rank: int = 0
    ) -> None:
        """Write page rows. Steps that are launched after this call read the new contents.

        If this raises, the caches may be invalid: call `reset`.

        Args:
          group: cache group of the rows.
          rows: indices of the page rows in the pool of the data rank.
          contents: contents of the rows as returned by `read_rows`.
          rank: data rank that owns the pool.
        """
        self._allocate()
        self._caches = self._rows.write(self._caches, group, rows, contents, rank)

    def write_layer(
        self, group: GroupSizes, layer: int, rows: Int32[np.ndarray, "n"], contents: Mapping[str, np.ndarray]
    ) -> None:
        """Write page rows of one layer. The model must be on one device.

        If this raises, the caches may be invalid: call `reset`.
        """
        self._allocate()
        self._caches = self._rows.write_layer(self._caches, group, layer, rows, contents)

    # --- compilation

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Return every bucket that a step may use."""
        return self._config.buckets(all_logits)

    def bucket_of(self, plans: Sequence[StepPlan | None], all_logits: bool = False) -> Bucket:
        """Return the smallest bucket that holds the step of every data rank."""
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

    def compile(self, buckets: Sequence[Bucket], on_compiled: OnCompiled | None = None) -> None:
        """Compile the buckets that are not compiled yet.

        `on_compiled`, if given, receives the number of finished buckets and the number of new buckets: at the start,
        and whenever a bucket is finished.

        XLA spends most of its time on one core, so each bucket compiles in a thread while later buckets are traced, and
        kernels compile in further threads. On a GPU every compiled step then runs twice without rows: the first run
        loads its kernels, the second records CUDA graphs. These runs come last, because XLA drops the CUDA graphs of
        all programs when it loads another program.
        """
        new = [bucket for bucket in buckets if bucket not in self._compiled]
        if not new:
            return
        with contextlib.nullcontext() if self._processes is None else self._processes.busy(), self._timing():
            self._compiled |= self._compile({bucket: self._split_of(bucket) for bucket in new}, on_compiled)
            self._warm_up()

    def compile_writes(self) -> None:
        """Compile the program that writes the state of a request slot, if it is not compiled yet."""
        if self._write_slot is not None:
            return
        with contextlib.nullcontext() if self._processes is None else self._processes.busy(), self._timing():
            self._allocate()
            function: Any = write_slot
            if self._mesh is not None:
                of_ranks = PartitionSpec(DATA)
                function = over_mesh(function, self._mesh, (of_ranks, of_ranks), of_ranks)
            size = self._num_ranks * write_size()
            packed = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._placement)
            self._write_slot = jax.jit(function, donate_argnums=0).lower(self._edits, packed).compile()
            idle = np.zeros((self._num_ranks, write_size()), np.int32)
            idle[:, 0] = -1
            self._edits = self._write_slot(self._edits, self._put(idle.reshape(-1)))  # loads the program

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        """Add the duration of the context to `compile_s`."""
        began = time.perf_counter()
        yield
        self.compile_s += time.perf_counter() - began

    def _split_of(self, bucket: Bucket) -> LayeredStep | None:
        """Return how steps of a bucket are split into programs; None for a single program."""
        return self._long if bucket.prefill_tokens > CONCURRENT_TOKENS else None

    def _compile(
        self, new: Mapping[Bucket, LayeredStep | None], on_compiled: OnCompiled | None = None
    ) -> dict[Bucket, Any]:
        """Compile the step of each bucket: as one program, or as several programs if a `LayeredStep` is given.

        A compiled step takes (weights, caches, last tokens, packed, edits, masks).
        """
        last_tokens = self._allocate()
        on_gpu, on_mesh = _is_on_gpu(last_tokens), self._mesh is not None
        report = on_compiled or _ignore
        report(0, len(new))
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
                        state = self._caches, last_tokens, self._edits, self._no_masks[self._config.num_rows(bucket)]
                        compiled[bucket] = layered.compile(bucket, self._weights, *state, start)
            steps: dict[Bucket, Any] = {}
            for bucket, result in compiled.items():
                steps[bucket] = result()
                report(len(steps), len(new))
            return steps

    def _lower(self, bucket: Bucket, last_tokens: Int32[Array, "slots"] | SpeculativeState) -> jax.stages.Lowered:
        """Trace and lower the step of a bucket. On a mesh the program is the part of each device."""
        logits_of = self._logits_of if self._config.prompt_logprobs else None
        function = functools.partial(self._function, self._step, self._config, bucket, logits_of=logits_of)
        if self._mesh is not None:
            of_ranks = PartitionSpec(DATA)
            caches, last, edits = self._state_specs
            arguments = specs_of(self._all_weights()), caches, last, of_ranks, edits, of_ranks
            if self._processes is not None:  # every process reads the tokens of all ranks
                function = _gathering(function)
            read = of_ranks if self._processes is None else PartitionSpec()
            function = over_mesh(function, self._mesh, arguments, (read, read, read, *self._state_specs))
        size = self._num_ranks * PackedStep.size(self._config, bucket)
        packed = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._placement)
        masks = self._no_masks[self._config.num_rows(bucket)]
        donating = jax.jit(function, donate_argnums=(1, 2, 4))
        with _without_source_lines():
            return donating.lower(self._all_weights(), self._caches, last_tokens, packed, self._edits, masks)

    def _logits_of(self, weights: Any, hidden: Array) -> Array:
        """Return the logits of hidden states after the final norm."""
        return self._rebuild(weights).logits(hidden)

    def cut_steps(self, num_programs: int) -> None:
        """Set the number of programs that `launch` with `on_layer` splits a step into; at most one per layer."""
        if self._layered is None or self._layered.num_programs != num_programs:
            has_programs = self._long is not None and self._long.num_programs == num_programs
            self._layered = self._long if has_programs else LayeredStep(self._model, self._config, num_programs)
            self._copied = set()

    def compile_layers(self, buckets: Sequence[Bucket]) -> LayeredStep:
        """Compile the buckets with prompts for `launch` with `on_layer`, and the copies of page rows. On a GPU
        everything runs twice at the end, as in `compile`."""
        layered, groups = self._layered, self._config.groups or ()
        if layered is None:
            raise ValueError("buckets: `cut_steps` must be called before")
        new = [bucket for bucket in buckets if bucket.prefill_tokens and bucket not in self._copied]
        if new:
            with self._timing():
                self._compile({bucket: layered for bucket in new if bucket not in layered.compiled})
                warm_up_rows(self._caches, groups, layered.layer_ranges)
                self._warm_up()
                self._copied |= {*new}
        return layered

    def _warm_up(self) -> None:
        """On a GPU, run every compiled step twice without rows."""
        if _is_on_gpu(self._allocate()):
            of_layers = {} if self._layered is None else self._layered.compiled
            for bucket, step in [*self._compiled.items(), *of_layers.items()] * 2:
                self._run_idle(bucket, step)

    # --- steps

    def launch(
        self,
        plans: Sequence[StepPlan | None],
        all_logits: bool = False,
        *,
        rows: Sequence[np.ndarray] = (),
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        """Start a step and return without waiting for it. The device runs steps in launch order.

        If this raises, the caches may be invalid: call `reset`.

        Args:
          plans: plan of each data rank; None for a rank without rows. At least one has rows.
          all_logits: whether to return the logits of all prefill tokens.
          rows: int32 page rows of each cache group, to be copied layer by layer.
          on_layer: function that receives these copies; None for a step in one program. It requires one device, no
            drafts, and `cut_steps`.
        """
        bucket = self.bucket_of(plans, all_logits)
        if on_layer is not None:
            return self._launch_layers(plans, bucket, rows, on_layer)
        self.compile([bucket])
        self._write_slots(plans)
        packed, masks = self._pack(bucket, plans), self._masks(bucket, plans)
        if self._processes is None:
            results = self._run(self._compiled[bucket], packed, bucket, masks)
            read: Callable[[Array], np.ndarray] = np.asarray
        else:
            contents = [packed.tobytes(), *([] if masks is None else [masks.tobytes()])]
            read = self._processes.announce(f"step {self._num_steps}", repr(bucket).encode(), *contents)
            with self._processes.blamed():
                results = self._run(self._compiled[bucket], packed, bucket, masks)
        return self._launched(plans, bucket, results, read)

    def _launch_layers(
        self,
        plans: Sequence[StepPlan | None],
        bucket: Bucket,
        rows: Sequence[np.ndarray],
        on_layer: OnLayer,
    ) -> StepResult:
        """Start a step as several programs of consecutive layers, and copy page rows after each program."""
        step = self.compile_layers([bucket]).compiled[bucket]
        copying = copying_rows(rows, self._config.groups or (), on_layer)
        self._write_slots(plans)
        packed, masks = self._pack(bucket, plans), self._masks(bucket, plans)
        results = self._run(functools.partial(step, on_program=copying), packed, bucket, masks)
        return self._launched(plans, bucket, results)

    def _launched(
        self,
        plans: Sequence[StepPlan | None],
        bucket: Bucket,
        results: tuple[Array, Array, Array | None],
        read: Callable[[Array], np.ndarray] = np.asarray,
    ) -> StepResult:
        """Start the copies of the results of a step to the host."""
        tokens, logprobs, logits = results
        self._num_steps += 1
        tokens.copy_to_host_async()
        wants = any(
            plan.wants_prompt_logprobs or any(row.request.flags & RowFlags.LOGPROBS for row in plan.sampling_rows)
            for plan in plans
            if plan is not None
        )
        if wants:
            logprobs.copy_to_host_async()
        speculates = self._config.speculate is not None
        return StepResult(tuple(plans), tokens, bucket, logits, speculates, read, logprobs if wants else None)

    def _write_slots(self, plans: Sequence[StepPlan | None]) -> None:
        """Write the state of the request slots whose prompt ends in this step and that need a state."""
        model = self._model.config
        for rank, plan in enumerate(plans):
            for row in () if plan is None else plan.prefill:
                if row.samples and row.request.flags & (RowFlags.PENALTIES | RowFlags.TOKENS):
                    self.compile_writes()
                    self._allocate()
                    for write in pack_writes(row.request, row.request_slot, model.eos_token_ids, model.vocab_size):
                        packed = np.full((self._num_ranks, write_size()), -1, np.int32)  # a negative slot: no write
                        packed[rank] = write
                        self._edits = self._write_slot(self._edits, self._put(packed.reshape(-1)))

    def _masks(self, bucket: Bucket, plans: Sequence[StepPlan | None]) -> np.ndarray | None:
        """Return the bit masks of allowed tokens, uint32 [ranks · rows, W]; None if no row has a token filter.

        Raises:
          ValueError: a token filter returned an array of another shape or dtype.
        """
        num_rows = self._config.num_rows(bucket)
        shape = self._mask_shape(num_rows)
        masks: np.ndarray | None = None
        for rank, plan in enumerate(plans):
            begun = [] if plan is None else [*enumerate(plan.decode), *enumerate(plan.prefill, bucket.decode_rows)]
            for i, row in begun:
                request = row.request
                if not row.samples or request.token_filter is None:
                    continue
                masks = np.zeros(shape, np.uint32) if masks is None else masks
                try:
                    mask = request.token_filter.allowed(request.output_ids)
                except Exception as error:
                    error.add_note(f"token_filter of request {request.request_id!r}")
                    raise
                found = getattr(mask, "dtype", None), getattr(mask, "shape", None)
                if mask is not None and found != (np.uint32, shape[1:]):
                    got = reprlib.repr(mask) if found[1] is None else f"{found[0]} {[*found[1]]}"
                    of = f"for request {request.request_id!r}"
                    raise ValueError(f"token_filter: expected masks uint32 [{shape[1]}], got {got} {of}")
                masks[rank * num_rows + i] = np.uint32(2**32 - 1) if mask is None else mask
        return masks

    def run_idle(self, bucket: Bucket) -> None:
        """Run a compiled bucket without rows and wait for it. Caches and tokens do not change."""
        self._run_idle(bucket, self._compiled[bucket])

    def _run_idle(self, bucket: Bucket, step: Any) -> None:
        jax.block_until_ready(self._run(step, self._pack(bucket, [None] * self._num_ranks), bucket))

    def _all_weights(self) -> Any:
        """Return the target's weights; with speculation (target's, proposer's). A proposer may replace its weights
        between steps."""
        speculate = self._config.speculate
        return self._weights if speculate is None else (self._weights, speculate.proposer.weights)

    def _pack(self, bucket: Bucket, plans: Sequence[StepPlan | None]) -> Int32[np.ndarray, "n"]:
        """Pack the metadata of all data ranks into one array."""
        idle = StepPlan((), (), self._config.empty_tables)
        of_ranks = [PackedStep.pack(self._config, bucket, idle if plan is None else plan) for plan in plans]
        if any(plan is not None and plan.wants_prompt_logprobs for plan in plans):
            for packed in of_ranks:  # all devices must agree whether they compute logits of prompt tokens
                PackedStep.of(self._config, bucket, packed).wants_prompt_logprobs[:] = 1
        return of_ranks[0] if len(of_ranks) == 1 else np.concatenate(of_ranks)

    def _run(
        self, step: Callable[..., Any], packed: Int32[np.ndarray, "n"], bucket: Bucket, masks: np.ndarray | None = None
    ) -> tuple[Array, Array, Array | None]:
        """Start a compiled step. Return its sampled tokens, their log probabilities, and its logits if the bucket has
        all_logits."""
        on_devices, last_tokens = self._put(packed), self._allocate()
        of_masks = self._no_masks[self._config.num_rows(bucket)] if masks is None else self._put(masks)
        tokens, logprobs, logits, self._caches, self._last_tokens, self._edits = step(
            self._all_weights(), self._caches, last_tokens, on_devices, self._edits, of_masks
        )
        return tokens, logprobs, logits


@contextlib.contextmanager
def _without_source_lines() -> Iterator[None]:
    """Lower without Python source locations. XLA records the locations of every kernel, which takes seconds for a step
    with prompts. Names of operations are not affected."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _ignore(num_compiled: int, num_buckets: int) -> None:
    """`OnCompiled` that does nothing."""


def _is_on_gpu(arrays: Any) -> bool:
    return all(device.platform == "gpu" for device in jax.tree.leaves(arrays)[0].devices())


def _gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the step return the tokens, log probabilities and logits of all data ranks on every device."""

    def gathered(*arguments: Any) -> tuple[Any, ...]:
        *read, caches, last_tokens, edits = function(*arguments)
        everyone = functools.partial(jax.lax.all_gather, axis_name=DATA, tiled=True)
        return *jax.tree.map(everyone, read), caches, last_tokens, edits

    return gathered
