"""Runs planned steps on the device: packs their metadata, compiles each shape once, and keeps the cache in place."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from models.decoder.caches import Caches, KVScales, allocate_caches
from models.decoder.model import Decoder, split_model
from models.decoder.step_metadata import GroupTables, StepMetadata
from models.engine.group_sizes import GroupSizes
from models.engine.sampler import SamplingRows, sample
from models.engine.step_plan import ScheduledRow, StepPlan
from pallas_attn import PAGE_NONE, slot_mapping, token_positions

GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""What XLA launches as CUDA graphs, whatever XLA_FLAGS say of that. Loops are not among it by default, and the host
would wait for the device in every layer of a step with prompts, to learn how many pieces of a cached prefix there are.
"""


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of a step, which decide what is compiled.

    Attributes:
      decode_rows: Bd, decode tokens with padding.
      prefill_tokens: prefill tokens with padding.
      all_logits: whether the logits of every prefill token are computed and returned, not only of those that sample.
    """

    decode_rows: int
    prefill_tokens: int
    all_logits: bool = False


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Sizes the runner allocates and compiles for.

    Attributes:
      num_pages, page_size: of every layer's cache, unless `groups` have pages of their own.
      table_pages: pages a sequence can have.
      max_num_seqs: running requests.
      max_prefill_seqs: prefill rows of a step.
      decode_buckets, prefill_buckets: sizes steps are padded to, ascending; the last ones bound a step.
      cache_dtype: of latents or keys and values; None for the model's dtype.
      kv_scales: static scales of quantised keys and values; None for one a token and head.
      groups: the model's cache groups; None for one, of all layers and with tables of page ids.
    """

    num_pages: int
    page_size: int
    table_pages: int
    max_num_seqs: int
    max_prefill_seqs: int
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    cache_dtype: DTypeLike | None = None
    kv_scales: KVScales | None = None
    groups: tuple[GroupSizes, ...] | None = None

    def table_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Of the tables of so many sequences, for each cache group."""
        heads = [(g.num_heads,) if g.head_wise else () for g in self.groups] if self.groups else [()]
        return tuple((rows, *of_heads, self.table_pages) for of_heads in heads)

    def layer_pages(self, num_layers: int) -> list[int]:
        """Pages of each layer's cache."""
        pages = {layer: group.num_pages for group in self.groups or () for layer in group.layers}
        return [pages.get(layer, self.num_pages) for layer in range(num_layers)]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a launched step leaves on the device.

    Attributes:
      plan: what was launched.
      tokens: int32, sampled tokens: decode rows of the bucket first, then prefill rows.
      bucket: what it was padded to.
      logits: float32 [prefill tokens, V] of a bucket with all_logits, else None.
    """

    plan: StepPlan
    tokens: Int32[Array, "n"]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None

    def sampled(self) -> list[int]:
        """One token for each of `plan.sampling_rows`. Waits for the device."""
        tokens = np.asarray(self.tokens)
        rows = [*range(len(self.plan.decode))]
        rows += [self.bucket.decode_rows + i for i, row in enumerate(self.plan.prefill) if row.samples]
        return tokens[rows].tolist()


class Runner:
    """Owns the weights, the caches and the last sampled token of every running request, all on the device."""

    def __init__(self, model: Decoder, config: RunnerConfig):
        self._config = config
        self._model_config = model.config
        self._specs = [
            model.cache_spec(num_pages, config.page_size, config.cache_dtype, config.kv_scales)
            for num_pages in config.layer_pages(model.config.num_hidden_layers)
        ]
        self._step, self._weights = split_model(model)
        self._compiled: dict[Bucket, Any] = {}
        self.compile_s = 0.0
        self._caches: Caches = ()
        self.reset()

    @property
    def num_compilations(self) -> int:
        """Buckets compiled so far."""
        return len(self._compiled)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all layers' caches."""
        return sum(spec.num_bytes for spec in self._specs)

    def reset(self) -> None:
        """Allocates empty caches, as at the start or after a step failed with the old ones donated."""
        self._caches = ()  # there may not be room for both
        self._caches = allocate_caches(self._model_config, self._specs, self._config.kv_scales)
        self._last_tokens = jnp.zeros((self._config.max_num_seqs,), jnp.int32)

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Every bucket a step can fall into. Steps that mix decode and prefill pad to the largest decode size: their
        prefill costs more than idle decode rows, and compiling every combination would cost far more."""
        config = self._config
        decode_only = [Bucket(d, 0) for d in config.decode_buckets]
        prefill_only = [Bucket(0, t, all_logits) for t in config.prefill_buckets]
        mixed = [Bucket(config.decode_buckets[-1], t, all_logits) for t in config.prefill_buckets]
        return decode_only + prefill_only + mixed

    def bucket_of(self, plan: StepPlan, all_logits: bool = False) -> Bucket:
        """The smallest bucket that holds the step."""
        num_prefill = sum(row.num_tokens for row in plan.prefill)
        return next(
            bucket
            for bucket in self.buckets(all_logits)
            if len(plan.decode) <= bucket.decode_rows and num_prefill <= bucket.prefill_tokens
        )

    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Compiles the buckets that are not yet compiled. On a GPU every compiled one is then run without rows, twice:
        the first run loads its kernels, the second records them. That comes last, because XLA drops the CUDA graphs of
        all programs whenever it makes another.
        """
        new = [bucket for bucket in buckets if bucket not in self._compiled]
        if not new:
            return
        began = time.perf_counter()
        on_gpu = all(device.platform == "gpu" for device in self._last_tokens.devices())
        for bucket in new:
            function = functools.partial(_run_step, self._step, self._config, bucket)
            packed = jax.ShapeDtypeStruct((PackedStep.size(self._config, bucket),), jnp.int32)
            donating = jax.jit(function, donate_argnums=(1, 2))
            lowered = donating.lower(self._weights, self._caches, self._last_tokens, packed)
            self._compiled[bucket] = lowered.compile(GPU_OPTIONS if on_gpu else None)
        if on_gpu:
            for bucket in [*self._compiled] * 2:
                self.run_idle(bucket)
        self.compile_s += time.perf_counter() - began

    def run_idle(self, bucket: Bucket) -> None:
        """Runs a compiled bucket without rows and waits for it, which leaves caches and tokens as they are."""
        shapes = self._config.table_shapes(0)
        tables = tuple(np.zeros((0, *(heads or (1,)), pages), np.int32) for _, *heads, pages in shapes)
        jax.block_until_ready(self._run(bucket, StepPlan((), (), tables)))

    def launch(self, plan: StepPlan, all_logits: bool = False) -> StepResult:
        """Starts a step and returns without waiting for it. Steps run in the order they are launched.

        If this raises, the caches may be gone: call `reset`.
        """
        bucket = self.bucket_of(plan, all_logits)
        self.compile([bucket])
        tokens, logits = self._run(bucket, plan)
        tokens.copy_to_host_async()
        return StepResult(plan, tokens, bucket, logits)

    def _run(self, bucket: Bucket, plan: StepPlan) -> tuple[Array, Array | None]:
        """Starts a step: what it sampled, and its logits if the bucket has them."""
        packed = jax.device_put(PackedStep.pack(self._config, bucket, plan))
        tokens, logits, self._caches, self._last_tokens = self._compiled[bucket](
            self._weights, self._caches, self._last_tokens, packed
        )
        return tokens, logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A step's metadata. It travels to the device as one int32 array, because every transfer has its own latency.

    Attributes:
      decode_slots, decode_kv_lens, decode_tables: of Bd rows; slot -1 and length 0 for idle ones. Tables here and below
        are one for each cache group.
      prefill_ids, cu_q_lens, prefill_kv_lens, prefill_tables: tokens and their sequences.
      prefill_slots: where to keep the token sampled at the end of each prefill row; -1 if none is.
      temperature, top_k, top_p, seed: of decode rows, then of prefill rows; floats and seeds by their bits.
    """

    decode_slots: Any
    decode_kv_lens: Any
    decode_tables: Any
    prefill_ids: Any
    cu_q_lens: Any
    prefill_kv_lens: Any
    prefill_tables: Any
    prefill_slots: Any
    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any

    @staticmethod
    def _shapes(config: RunnerConfig, bucket: Bucket) -> dict[str, Any]:
        """Of each field; a tuple of them for fields that every cache group has one of."""
        decode, prefill = bucket.decode_rows, config.max_prefill_seqs if bucket.prefill_tokens else 0
        rows = (decode + prefill,)
        return {
            "decode_slots": (decode,),
            "decode_kv_lens": (decode,),
            "decode_tables": config.table_shapes(decode),
            "prefill_ids": (bucket.prefill_tokens,),
            "cu_q_lens": (prefill + 1,),
            "prefill_kv_lens": (prefill,),
            "prefill_tables": config.table_shapes(prefill),
            "prefill_slots": (prefill,),
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "seed": rows,
        }

    @classmethod
    def size(cls, config: RunnerConfig, bucket: Bucket) -> int:
        return sum(map(math.prod, _each(cls._shapes(config, bucket).values())))

    @classmethod
    def of(cls, config: RunnerConfig, bucket: Bucket, packed: Any) -> PackedStep:
        """The fields of a packed array, as views of it (numpy) or slices (jax)."""
        offset = 0

        def take(shape: tuple[Any, ...]) -> Any:
            nonlocal offset
            if isinstance(shape[0], tuple):
                return tuple(map(take, shape))
            begin, offset = offset, offset + math.prod(shape)
            return packed[begin:offset].reshape(shape)

        return cls(**{name: take(shape) for name, shape in cls._shapes(config, bucket).items()})

    @classmethod
    def pack(cls, config: RunnerConfig, bucket: Bucket, plan: StepPlan) -> np.ndarray:
        packed = np.zeros((cls.size(config, bucket),), np.int32)
        step = cls.of(config, bucket, packed)
        for ids in (step.decode_slots, *step.decode_tables, *step.prefill_tables, step.prefill_slots):
            ids.fill(PAGE_NONE)
        num_decode = len(plan.decode)
        for of_decode, of_prefill, tables in zip(step.decode_tables, step.prefill_tables, plan.tables, strict=True):
            of_decode[:num_decode] = tables[:num_decode].reshape(-1, *of_decode.shape[1:])
            of_prefill[: len(plan.prefill)] = tables[num_decode:].reshape(-1, *of_prefill.shape[1:])
        for i, row in enumerate(plan.decode):
            step.decode_slots[i], step.decode_kv_lens[i] = row.slot, row.start + 1
            step._set_sampling(i, row)
        end = 0
        for i, row in enumerate(plan.prefill):
            step.prefill_ids[end : end + row.num_tokens] = row.request.token_ids[row.start : row.start + row.num_tokens]
            end += row.num_tokens
            step.cu_q_lens[i + 1 :] = end
            step.prefill_kv_lens[i] = row.start + row.num_tokens
            step.prefill_slots[i] = row.slot if row.samples else PAGE_NONE
            step._set_sampling(bucket.decode_rows + i, row)
        return packed

    def _set_sampling(self, i: int, row: ScheduledRow) -> None:
        params = row.request.params
        self.temperature.view(np.float32)[i] = params.temperature
        self.top_p.view(np.float32)[i] = params.top_p
        self.seed.view(np.uint32)[i] = params.seed
        self.top_k[i] = min(params.top_k, np.iinfo(np.int32).max)

    def sampling_rows(self) -> SamplingRows:
        """How each row samples; a sampled token stands right after the tokens its sequence holds."""
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
        return SamplingRows(
            temperature=bits(self.temperature),
            top_k=self.top_k,
            top_p=bits(self.top_p),
            seed=jax.lax.bitcast_convert_type(self.seed, jnp.uint32),
            position=jnp.concatenate([self.decode_kv_lens, self.prefill_kv_lens]),
        )

    def metadata(self, page_size: int, logit_rows: Int32[Array, "n"]) -> StepMetadata:
        """Positions, and slots in every cache group, of all tokens, worked out on the device."""
        parts = self._parts()
        positions = [token_positions(cu, lens, length=length) for cu, lens, length in parts.values()]
        groups = []
        for of_decode, of_prefill in zip(self.decode_tables, self.prefill_tables, strict=True):
            tables = {"decode": of_decode, "prefill": of_prefill}
            slots = [
                slot_mapping(tables[name], cu, lens, page_size=page_size, length=length)
                for name, (cu, lens, length) in parts.items()
            ]
            groups.append(GroupTables(jnp.concatenate(slots), of_decode, of_prefill))
        return StepMetadata(
            positions=jnp.maximum(jnp.concatenate(positions), 0),
            groups=tuple(groups),
            decode_kv_lens=self.decode_kv_lens,
            cu_q_lens=self.cu_q_lens,
            prefill_kv_lens=self.prefill_kv_lens,
            logit_rows=logit_rows,
        )

    def _parts(self) -> dict[str, tuple[Any, Any, int]]:
        """Prefix sums of new tokens, lengths of sequences and number of tokens of the parts that are not empty."""
        num_decode, num_prefill = self.decode_slots.shape[0], self.prefill_ids.shape[0]
        decode_cu = jnp.arange(num_decode + 1, dtype=jnp.int32)
        parts = {
            "decode": (decode_cu, self.decode_kv_lens, num_decode),
            "prefill": (self.cu_q_lens, self.prefill_kv_lens, num_prefill),
        }
        return {name: part for name, part in parts.items() if part[2]}


def _each(shapes: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, ...]]:
    """Shapes, and those in tuples of shapes."""
    for shape in shapes:
        yield from _each(shape) if isinstance(shape[0], tuple) else (shape,)


def _run_step(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: Sequence[Array],
    caches: Caches,
    last_tokens: Int32[Array, "slots"],
    packed: Int32[Array, "n"],
) -> tuple[Int32[Array, "rows"], Float[Array, "tokens V"] | None, Caches, Int32[Array, "slots"]]:
    """One step on the device: tokens in from the last step's samples and the host, samples out."""
    step = PackedStep.of(config, bucket, packed)
    decode_ids = last_tokens[jnp.maximum(step.decode_slots, 0)]
    tokens = jnp.concatenate([decode_ids, step.prefill_ids])
    decode_rows = jnp.arange(bucket.decode_rows, dtype=jnp.int32)
    prefill_ends = bucket.decode_rows + jnp.maximum(step.cu_q_lens[1:] - 1, 0)
    sampling = jnp.concatenate([decode_rows, prefill_ends])
    logit_rows = jnp.arange(tokens.shape[0], dtype=jnp.int32) if bucket.all_logits else sampling
    logits, caches = model_step(weights, tokens, caches, step.metadata(config.page_size, logit_rows))
    chosen, _ = sample(logits[sampling] if bucket.all_logits else logits, step.sampling_rows())
    slots = jnp.concatenate([step.decode_slots, step.prefill_slots])
    slots = jnp.where(slots < 0, last_tokens.shape[0], slots)  # .at[-1] would wrap; one past the end is dropped
    last_tokens = last_tokens.at[slots].set(chosen, mode="drop")
    return chosen, logits[bucket.decode_rows :] if bucket.all_logits else None, caches, last_tokens
