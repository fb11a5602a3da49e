"""The runner: owns weights and caches on the device, and launches planned steps.

A step consists of several programs, which `step/compiler.py` compiles: `propose` (drafts), `forward`, `score` (log
probabilities of prompt tokens) and `sample`, in this order. If no row of a step needs a token mask, `Runner.launch`
launches all of them. Otherwise it launches all except `sample`, and the caller launches `sample` with `Runner.sample`
as soon as it has read the tokens of the previous step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder import Caches, Decoder, over_mesh, shapes_of, with_settings
from pallas_attn.models.decoder.deepseek_v4 import check_queries
from pallas_attn.models.decoder.mesh import DATA, cache_partition
from pallas_attn.models.engine.compile_options import CONCURRENT_TOKENS, MAX_LAYERS_PER_PROGRAM
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.distributed.processes import Processes
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cache_rows import CacheRows
from pallas_attn.models.engine.kv_transfer.cached_pages import RowFormat
from pallas_attn.models.engine.kv_transfer.row_copies import GroupRows, warm_up_rows
from pallas_attn.models.engine.logit_edits import EditState, pack_writes, write_size, write_slot
from pallas_attn.models.engine.request import RowFlags
from pallas_attn.models.engine.speculation.step import (
    SpeculativeState,
    allocate_state,
    check_trees,
    has_drafts,
    proposer_sizes,
    state_partition,
)
from pallas_attn.models.engine.step.background import BackgroundCompiler
from pallas_attn.models.engine.step.cascade import cascade_steps
from pallas_attn.models.engine.step.compiler import OnCompiled, RunnerState, StepCompiler, is_on_gpu
from pallas_attn.models.engine.step.layered import LayeredStep, OnLayer, copying_rows
from pallas_attn.models.engine.step.masks import FilterErrors, has_masks, needs_drafts, step_masks
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import StepOutputs
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.step.result import StepResult, Unsampled
from pallas_attn.models.engine.weight_slots import NewWeights, WeightSlots


class Runner:
    """Owns the weights, the caches, and the last sampled token of every running request, all on the device. With
    speculation it also owns the proposer's state.

    A model on a mesh runs inside one `jax.shard_map` around the step. Each data rank has its own rows, tokens and
    pages.

    Attributes:
      background: compiler of buckets in the background, or None. `Warmup` sets it. While it is not None, a step uses
        the smallest compiled bucket that holds it, instead of the smallest bucket.
      compile_s: seconds of all compilations, except in the background.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, processes: Processes | None = None):
        """Allocate the caches; nothing is compiled.

        Raises:
          ValueError, NotImplementedError: the proposer does not support the model.
          NotImplementedError: cascade_attention is True, and the model does not support it.
        """
        if config.batch_invariant:
            model = with_settings(model, dataclasses.replace(model.settings, batch_invariant=True))
        config = dataclasses.replace(config, max_logprobs=min(config.max_logprobs, model.config.vocab_size))
        self._config, self._mesh, self._processes = config, model.mesh, processes
        self._model = shapes_of(model)  # `StepCompiler.weights` is the only reference to the weights
        self._prepare_state(self._model)
        self._cascade = cascade_steps(model, config, self._specs)
        self._rows = CacheRows(model, config, self._specs)
        self._programs = programs = StepCompiler(model, config, self._state_specs, gathers=processes is not None)
        self._num_ranks, self._placement = programs.num_ranks, programs.placement
        self._weight_slots = WeightSlots(model, None if config.speculate is None else config.speculate.proposer)
        if config.speculate is not None:
            self._proposer_sizes = proposer_sizes(config, model.config.num_hidden_layers, model.mesh)
            config.speculate.proposer.check(model.config, self._proposer_sizes)
            if isinstance(model.config, DeepseekV4Config):
                check_queries(model.config, 1 + config.draft_buckets[-1], config.page_size)
            if config.speculate.proposer.makes_trees:
                check_trees(model.config, model.settings, model.contexts)
        self._long = self._long_steps(self._model)
        # A proposer may need the hidden states of all tokens. Batch-invariant steps all have the same shapes.
        needs_hidden = config.speculate is not None and config.speculate.proposer.needs_hidden
        self._skips_layers = model.has_readers and not needs_hidden and not config.batch_invariant
        self._layered: LayeredStep | None = None
        self._copied: set[Bucket] = set()  # buckets whose row copies are compiled
        self.background: BackgroundCompiler | None = None
        self._num_steps = 0
        self.compile_s = 0.0
        self._caches: Caches = ()
        self._last_tokens: Int32[Array, "slots"] | SpeculativeState | None = None
        self._edits: Any = None  # EditState
        self._no_masks: dict[tuple[int, int], Array] = {}
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
        self._state_specs: tuple[Any, Any, Any] = (None, None, None)
        if model.mesh is not None:
            rows: Any = PartitionSpec(DATA) if config.speculate is None else state_partition()
            self._state_specs = cache_partition(model.part, self._specs, model.contexts), rows, PartitionSpec(DATA)
            self._make_state = jax.jit(over_mesh(self._make_state, model.mesh, (), self._state_specs))

    def _long_steps(self, model: Decoder) -> LayeredStep | None:
        """Return how long steps are split into several programs; None if they are single programs."""
        config = self._config
        # One program per step in these cases: a proposer drafts and observes around the whole step; steps of several
        # processes, and prompt logits that all of them read, need a single program; and batch-invariant steps must all
        # be the same program. A mesh of one process could split long steps, but that has not been measured.
        is_whole = config.speculate is not None or model.mesh is not None or config.batch_invariant
        num_programs = -(-len(self._specs) // MAX_LAYERS_PER_PROGRAM)
        return None if is_whole or num_programs == 1 else LayeredStep(model, config, num_programs)

    def now(self) -> float:
        """Time in seconds, on a clock that stops during compilation."""
        return time.perf_counter() - self.compile_s

    @property
    def num_compilations(self) -> int:
        """Number of compiled buckets."""
        return len(self._programs.forward)

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
            for shape in {self._programs.mask_shape(bucket) for bucket in self.buckets()}:
                self._no_masks[shape] = self._put(np.zeros(shape, np.uint32))
        return self._last_tokens

    def _state(self) -> RunnerState:
        """Return the arrays for which programs are compiled."""
        return RunnerState(
            last_tokens=self._allocate(), caches=self._caches, edits=self._edits, no_masks=self._no_masks
        )

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
        return self._rows.cache_format(self._programs.model)

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
        self,
        group: GroupSizes,
        layer: int,
        rows: Int32[np.ndarray, "n"],
        contents: Mapping[str, np.ndarray],
        rank: int = 0,
    ) -> None:
        """Write page rows of one layer. Steps that are launched after this call read the new contents.

        If this raises, the caches may be invalid: call `reset`.

        Args:
          group: cache group of the layer.
          layer: index of the layer.
          rows: indices of the page rows in the pool of the data rank.
          contents: contents of the rows, [n, ...], by name of the array, for example "k".
          rank: data rank that owns the pool.
        """
        self._allocate()
        self._caches = self._rows.write_layer(self._caches, group, layer, rows, contents, rank)

    # --- weights

    @property
    def weights(self) -> dict[str, Array]:
        """The model's weights by name."""
        return dict(zip(self._weight_slots.model, self._programs.weights, strict=True))

    def check_weights(self, weights: Any, draft: Any) -> NewWeights:
        """Return the weights of `Engine.update_weights` in the order of the compiled programs.

        Raises:
          ValueError: as `Engine.update_weights`.
        """
        return self._weight_slots.check(weights, draft)

    def place_weights(self, new: NewWeights, *, copy: bool, in_place: bool) -> NewWeights:
        """Copy weights to the devices and wait for the copies.

        Args:
          new: result of `check_weights`.
          copy: whether arrays that have the devices and the sharding of the present weights are copied, too.
          in_place: whether each present weight is released before its successor is copied. If this call raises,
            `launch` raises RuntimeError until `use_weights` is called.
        """
        return self._weight_slots.place(new, self._programs if in_place else None, copy=copy)

    def use_weights(self, new: NewWeights) -> None:
        """Use the weights, from `place_weights`, in all steps that are launched from now on."""
        self._weight_slots.use(new, self._programs)

    # --- compilation

    def buckets(self, all_logits: bool = False, prompt_logprobs: bool = False) -> list[Bucket]:
        """Return every bucket that a step may use.

        Args:
          all_logits: whether the steps return the logits of every prefill token.
          prompt_logprobs: whether the steps compute log probabilities of prompt tokens, which need the hidden states of
            every prefill token.
        """
        buckets = self._config.buckets(all_logits)
        if self._cascade is not None:
            buckets += self._cascade.buckets
        if not self._skips_layers or all_logits or prompt_logprobs:
            return buckets
        return [dataclasses.replace(bucket, skips_layers=bucket.prefill_tokens > 0) for bucket in buckets]

    def bucket_of(self, plans: Sequence[StepPlan | None], all_logits: bool = False) -> Bucket:
        """Return the smallest bucket that holds the step of every data rank, without `Bucket.cascade`."""
        return self._holding(plans, all_logits)[0]

    def _holding(self, plans: Sequence[StepPlan | None], all_logits: bool) -> list[Bucket]:
        """Return the buckets that hold the step of every data rank, without `Bucket.cascade`, the smallest first."""
        some = [plan for plan in plans if plan is not None]
        prompt_logprobs = any(plan.wants_prompt_logprobs for plan in some)
        num_decode = max(len(plan.decode) for plan in some)
        num_prefill = max(sum(row.num_tokens for row in plan.prefill) for plan in some)
        num_drafts = max(plan.num_drafts for plan in some)
        return [
            bucket
            for bucket in self._usable(all_logits, prompt_logprobs)
            if num_decode <= bucket.decode_rows and num_prefill <= bucket.prefill_tokens
            if num_drafts <= bucket.num_drafts and not bucket.cascade
        ]

    def _choose(self, plans: Sequence[StepPlan | None], all_logits: bool) -> tuple[Bucket, list[int]]:
        """Return the bucket of a step, and the shared pages of each data rank as `CascadeSteps.choose`.

        With `background`, this is the smallest compiled bucket, if one holds the step. Smaller buckets are counted.
        """
        holding, shared_pages = self._holding(plans, all_logits), list[int]()
        bucket = smallest = holding[0]
        if self._cascade is not None:
            bucket, shared_pages = self._cascade.choose(smallest, plans)
        if self.background is None:
            return bucket, shared_pages
        compiled = self._programs.forward
        if bucket != smallest:
            if bucket not in compiled:
                self.background.count_miss(bucket)
            for each in holding:
                if (cascade := dataclasses.replace(each, cascade=True)) in compiled:
                    return cascade, shared_pages
        bucket = next((each for each in holding if each in compiled), smallest)
        if bucket != smallest:
            self.background.count_miss(smallest)
        return bucket, []

    def _usable(self, all_logits: bool, prompt_logprobs: bool) -> list[Bucket]:
        """Return the buckets among which `_holding` chooses. With `background`, the buckets that compute hidden
        states of prompt tokens also serve steps that do not need them."""
        buckets = self.buckets(all_logits, prompt_logprobs)
        return buckets if self.background is None else [*dict.fromkeys([*buckets, *self.buckets(all_logits, True)])]

    def compile(self, buckets: Sequence[Bucket], on_compiled: OnCompiled | None = None) -> None:
        """Compile the buckets that are not compiled yet.

        `on_compiled`, if given, receives the number of finished buckets and the number of new buckets: at the start,
        and whenever a bucket is finished.

        XLA spends most of its time on one core, so each bucket compiles in a thread while later buckets are traced, and
        kernels compile in further threads. On a GPU every compiled step then runs twice without rows: the first run
        loads its kernels, the second records CUDA graphs. These runs come last, because XLA drops the CUDA graphs of
        all programs when it loads another program.
        """
        new = [bucket for bucket in buckets if bucket not in self._programs.forward]
        if not new:
            return
        with contextlib.nullcontext() if self._processes is None else self._processes.busy(), self._timing():
            splits = {bucket: self._split_of(bucket) for bucket in new}
            self._programs.forward |= self._programs.compile(splits, self._state(), on_compiled)
            self._warm_up()

    def covering_buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Return few buckets. Each step fits into one of them, even with log probabilities of its prompts."""
        return self._config.covering_buckets(all_logits)

    def start_compiling(self, buckets: Sequence[Bucket]) -> BackgroundCompiler | None:
        """Start a thread that compiles the buckets that are not compiled yet; None if all are compiled."""
        new = {bucket: self._split_of(bucket) for bucket in buckets if bucket not in self._programs.forward}
        return BackgroundCompiler(self._programs, new, self._programs.shapes(self._state())) if new else None

    def add_compiled(self, bucket: Bucket, forward: Any) -> None:
        """Make a bucket available that a `BackgroundCompiler` has compiled. On a GPU, run it twice without rows.

        If this raises, the caches may be invalid: call `reset`.

        Args:
          bucket: the bucket.
          forward: its forward program.
        """
        with self._timing():
            self._run_twice([(bucket, forward)])
        self._programs.forward[bucket] = forward

    def prompt_sizes(self, all_logits: bool = False) -> tuple[int, ...]:
        """Return the numbers of prompt tokens to which steps are padded, ascending. With `background`, numbers
        below the largest are returned only if all their buckets are compiled."""
        sizes, compiled = self._config.prefill_buckets, self._programs.forward
        if self.background is None:
            return sizes
        missing = {bucket.prefill_tokens for bucket in self.buckets(all_logits) if bucket not in compiled}
        return (*(size for size in sizes[:-1] if size not in missing), sizes[-1])

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

    def cut_steps(self, num_programs: int) -> None:
        """Set the number of programs that `launch` with `on_layer` splits a step into; at most one per layer."""
        if self._layered is None or self._layered.num_programs != num_programs:
            has_programs = self._long is not None and self._long.num_programs == num_programs
            self._layered = self._long if has_programs else LayeredStep(self._model, self._config, num_programs)
            self._copied = set()

    def compile_layers(self, buckets: Sequence[Bucket]) -> LayeredStep:
        """Compile the buckets with prompts for `launch` with `on_layer`, and the copies of page rows. On a GPU
        everything runs twice at the end, as in `compile`."""
        layered = self._layered
        if layered is None:
            raise ValueError("buckets: `cut_steps` must be called before")
        new = [bucket for bucket in buckets if bucket.prefill_tokens and bucket not in self._copied]
        if new:
            with self._timing():
                self._programs.compile({b: layered for b in new if b not in layered.compiled}, self._state())
                warm_up_rows(self._caches, self._first_rows, layered.layer_ranges)
                self._warm_up()
                self._copied |= {*new}
        return layered

    def _first_rows(self, count: int) -> Mapping[int, GroupRows]:
        """Return, for each layer, the number of the first page row of every data rank, `count` times."""
        of_ranks = [np.zeros((count,), np.int32)] * self._num_ranks
        return self._rows.on_devices([of_ranks] * len(self._config.groups or ()))

    def warm_up(self) -> None:
        """On a GPU, run all compiled steps without rows, which records the CUDA graphs that XLA dropped when it loaded
        later programs."""
        with self._timing():
            self._warm_up()

    def _warm_up(self) -> None:
        """On a GPU, run every compiled step twice without rows."""
        of_layers = {} if self._layered is None else self._layered.compiled
        self._run_twice([*self._programs.forward.items(), *of_layers.items()])

    def _run_twice(self, steps: Sequence[tuple[Bucket, Callable[..., Any]]]) -> None:
        """On a GPU, run steps without rows, one after the other, and then once more."""
        if is_on_gpu(self._allocate()):
            for bucket, step in [*steps, *steps]:
                self._run_idle(bucket, step)

    # --- steps

    def launch(
        self,
        plans: Sequence[StepPlan | None],
        all_logits: bool = False,
        *,
        rows: Sequence[Sequence[Int32[np.ndarray, "_"]]] = (),
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        """Start a step and return without waiting for it. The device runs steps in launch order.

        If a row of the step needs a token mask, its tokens are not sampled yet: call `sample`.

        If this raises, the caches may be invalid: call `reset`.

        Args:
          plans: plan of each data rank; None for a rank without rows. At least one has rows.
          all_logits: whether to return the logits of all prefill tokens.
          rows: page rows of each cache group and each data rank, to be copied layer by layer.
          on_layer: function that receives these copies; None to run the forward pass without copies. It requires one
            process, no drafts, and `cut_steps`.
        """
        bucket, shared_pages = self._choose(plans, all_logits)
        copy, last = None, range(0)
        if on_layer is None:
            self.compile([bucket])
            forward = self._programs.forward[bucket]
        else:
            step = self.compile_layers([bucket]).compiled[bucket]
            copy, last = copying_rows(self._rows.on_devices(rows), on_layer), step.layer_ranges[-1]
            forward = functools.partial(step, on_program=copy)
        packed, writes = self._pack(bucket, plans, shared_pages), self._slot_writes(plans)
        read: Callable[[Array], np.ndarray] = np.asarray
        if self._processes is not None:
            contents = repr(bucket).encode(), packed.tobytes(), *(write.tobytes() for write in writes)
            read = self._processes.announce(f"step {self._num_steps}", *contents)
        self._num_steps += 1
        with self._blamed():
            for write in writes:
                self._edits = self._write_slot(self._edits, self._put(write))
            unsampled = self._run_forward(forward, bucket, plans, packed)
            words = self._score(bucket, plans, unsampled.outputs)
            speculates, logits = self._config.speculate is not None, unsampled.outputs.prompt_logits
            result = StepResult(tuple(plans), bucket, logits, words, speculates, read, unsampled)
            if not has_masks(plans):
                self._sample(result, None)
            elif unsampled.for_host is not None and needs_drafts(plans):
                unsampled.for_host.copy_to_host_async()
        if copy is not None:
            copy(last, self._caches[last.start :])
        return result

    def sample(self, result: StepResult) -> FilterErrors:
        """Sample the tokens of a step whose rows need token masks. The host has read the tokens of all earlier steps.

        If this raises, the caches may be invalid: call `reset`.

        Returns:
          The requests whose token filter failed. Their tokens in this step are not valid.
        """
        if result.unsampled is None:
            raise ValueError("step: expected a step whose tokens are not sampled")
        bucket, for_host, drafts = result.bucket, result.unsampled.for_host, None
        if for_host is not None and needs_drafts(result.plans):
            drafts = np.asarray(for_host) if self._processes is None else self._processes.read(for_host)
        shape = self._programs.mask_shape(bucket)
        masks, errors = step_masks(result.plans, bucket, shape, drafts, self._model.config.eos_token_ids)
        if self._processes is not None:
            result.read = self._processes.announce(f"token masks {self._num_steps - 1}", masks.tobytes())
        with self._blamed():
            self._sample(result, masks)
        return errors

    def _blamed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._processes is None else self._processes.blamed()

    def _run_forward(
        self,
        forward: Callable[..., Any],
        bucket: Bucket,
        plans: Sequence[StepPlan | None],
        packed: Int32[np.ndarray, "n"],
    ) -> Unsampled:
        """Start the programs `propose` and `forward` of a step."""
        weights = self._programs.weights  # raises if they were lost
        on_devices, last_tokens = self._put(packed), self._allocate()
        drafts = for_host = None
        if has_drafts(bucket):
            program, of_decode = self._programs.shared_program("propose", bucket), on_devices
            if bucket.prefill_tokens:
                decode = [plan and plan.without_prefill() for plan in plans]
                of_decode = self._put(self._pack(program.bucket, decode))
            arguments = self._programs.proposer_weights, last_tokens, of_decode
            drafts, for_host, last_tokens = self._programs.shared[program](*arguments)
            self._last_tokens = last_tokens
        outputs, self._caches = forward(weights, self._caches, last_tokens, on_devices, drafts)
        return Unsampled(outputs, drafts, for_host)

    def _score(self, bucket: Bucket, plans: Sequence[StepPlan | None], outputs: StepOutputs) -> Array | None:
        """Start the program for log probabilities of prompt tokens, if a request wants them."""
        if not any(plan.wants_prompt_logprobs for plan in plans if plan is not None):
            return None
        tokens = np.full((self._num_ranks, bucket.prefill_tokens), -1, np.int32)
        for of_rank, plan in zip(tokens, plans, strict=True):
            begin = 0
            for row in () if plan is None else plan.prefill:
                known = row.request.token_ids[row.start + 1 : row.start + 1 + row.num_scored]
                of_rank[begin : begin + len(known)] = known
                begin += row.num_tokens
        score = self._programs.shared[self._programs.shared_program("score", bucket)]
        words = score(self._programs.weights, outputs.prompt_hidden, self._put(tokens.reshape(-1)))
        words.copy_to_host_async()
        return words

    def _sample(self, result: StepResult, masks: np.ndarray | None) -> None:
        """Start the program that samples, and the copies of its results to the host."""
        if result.unsampled is None:
            raise ValueError("step: expected a step whose tokens are not sampled")
        result.tokens, logprobs = self._run_sample(result.bucket, result.unsampled, masks)
        result.unsampled = None  # release the logits
        result.tokens.copy_to_host_async()
        rows = (row for plan in result.plans if plan is not None for row in plan.sampling_rows)
        if any(row.request.flags & RowFlags.LOGPROBS for row in rows):
            logprobs.copy_to_host_async()
            result.logprobs = logprobs

    def _run_sample(self, bucket: Bucket, unsampled: Unsampled, masks: np.ndarray | None) -> tuple[Array, Array]:
        """Start the program that samples. Return the tokens and their log probabilities."""
        program = self._programs.shared[self._programs.shared_program("sample", bucket)]
        speculate, moves = self._config.speculate, self._programs.moves_tokens(bucket)
        of_masks = self._no_masks[self._programs.mask_shape(bucket)] if masks is None else self._put(masks)
        needs_hidden = speculate is not None and speculate.proposer.needs_hidden
        state = self._caches if moves else (), self._last_tokens, self._edits
        inputs = unsampled.outputs.for_sampling(needs_hidden=needs_hidden), unsampled.drafts, of_masks
        results = program(self._programs.proposer_weights, *state, *inputs)
        tokens, logprobs, caches, self._last_tokens, self._edits = results
        if moves:
            self._caches = caches
        return tokens, logprobs

    def _slot_writes(self, plans: Sequence[StepPlan | None]) -> list[np.ndarray]:
        """Return the arguments of the writes of request slots whose prompt ends in this step and that need a state. The
        program that writes them is compiled."""
        model, writes = self._model.config, []
        for rank, plan in enumerate(plans):
            for row in () if plan is None else plan.prefill:
                if row.samples and row.request.flags & (RowFlags.PENALTIES | RowFlags.TOKENS):
                    for write in pack_writes(row.request, row.request_slot, model.eos_token_ids, model.vocab_size):
                        packed = np.full((self._num_ranks, write_size()), -1, np.int32)  # a negative slot: no write
                        packed[rank] = write
                        writes.append(packed.reshape(-1))
        if writes:
            self.compile_writes()
            self._allocate()
        return writes

    def run_idle(self, bucket: Bucket) -> None:
        """Run a compiled bucket without rows and wait for it. Caches and tokens do not change."""
        self._run_idle(bucket, self._programs.forward[bucket])

    def _run_idle(self, bucket: Bucket, forward: Callable[..., Any]) -> None:
        """Run all programs of a step without rows and wait for them."""
        plans = [None] * self._num_ranks
        unsampled = self._run_forward(forward, bucket, plans, self._pack(bucket, plans))
        results = [self._run_sample(bucket, unsampled, None)]
        if bucket.prefill_tokens and not bucket.skips_layers:
            tokens = self._put(np.full(self._num_ranks * bucket.prefill_tokens, -1, np.int32))
            score = self._programs.shared[self._programs.shared_program("score", bucket)]
            results.append(score(self._programs.weights, unsampled.outputs.prompt_hidden, tokens))
        jax.block_until_ready(results)

    def _pack(
        self, bucket: Bucket, plans: Sequence[StepPlan | None], shared_pages: Sequence[int] = ()
    ) -> Int32[np.ndarray, "n"]:
        """Pack the metadata of all data ranks into one array. `shared_pages` has the number of pages that the decode
        rows of each rank share; empty for none."""
        idle, shared = StepPlan((), (), self._config.empty_tables), shared_pages or [0] * len(plans)
        of_ranks = [
            PackedStep.pack(self._config, bucket, idle if plan is None else plan, pages)
            for plan, pages in zip(plans, shared, strict=True)
        ]
        return of_ranks[0] if len(of_ranks) == 1 else np.concatenate(of_ranks)
