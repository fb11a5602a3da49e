"""Metadata of a step (lengths, block tables, prompt tokens, sampling parameters) in one array for the device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from pallas_attn import PAGE_NONE, slot_mapping, token_positions
from pallas_attn.models.decoder import GroupTables, StepMetadata
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.logit_edits import EditRows, LogitsProcessor
from pallas_attn.models.engine.sampler import SamplingRows
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedStep:
    """Metadata of a step with Bd decode rows and S prefill rows, both padded to the sizes of the step's bucket, for
    which its program was compiled.

    All fields are int32 and are sent to the device as one concatenated array, because each transfer has a latency. A
    request slot is the index of a running request in device arrays. A draft is a guessed token after the newest token
    of a decode row, which the step verifies (speculation).

    Attributes:
      decode_request_slots: [Bd], request slot; -1 for idle rows.
      decode_kv_lens: [Bd], tokens of the sequence including the row's token; 0 for idle rows. With speculation it is a
        lower bound, because earlier steps may accept drafts that the host has not read.
      decode_tables: block tables of the decode rows, one array for each cache group (layers with equal windows): [Bd,
        P] of page ids. If the KV heads of the group have different windows, [Bd, Hkv, P] of page rows (one page of one
        KV head).
      decode_limits: [Bd], maximum length of the sequence in tokens; empty without speculation.
      decode_drafts: [Bd], maximum number of drafts; empty without speculation.
      prefill_ids: [prefill tokens], token ids of all prefill rows, one row after the other.
      cu_q_lens: [S + 1], prefix sums of the number of tokens of each prefill row.
      prefill_kv_lens: [S], tokens of the sequence up to and including the row's last token.
      prefill_tables: block tables of the prefill rows, one array for each cache group: [S, P] or [S, Hkv, P].
      prefill_request_slots: [S], request slot for the token sampled after the row; -1 if no token is sampled.
      prefill_next: [S], the known token after the row's last token; -1 if this token is sampled.
      temperature, top_k, top_p, min_p, seed: [Bd + S], sampling parameters of decode rows, then of prefill rows.
        temperature, top_p and min_p are the bits of float32 values, seed is the bits of a uint32 value.
      flags: [Bd + S], `RowFlags` of rows that sample a token; 0 for other rows.
      penalties: [3, Bd + S], bits of the float32 values of repetition, presence and frequency penalties.
      extra: [names, Bd + S], bits of the float32 arguments of the logits processor.
      shared_pages: [1], `StepMetadata.shared_pages`, if `Bucket.cascade`; otherwise empty.
    """

    decode_request_slots: Any
    decode_kv_lens: Any
    decode_tables: Any
    decode_limits: Any
    decode_drafts: Any
    prefill_ids: Any
    cu_q_lens: Any
    prefill_kv_lens: Any
    prefill_tables: Any
    prefill_request_slots: Any
    prefill_next: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    flags: Any
    penalties: Any
    extra: Any
    shared_pages: Any

    @staticmethod
    def _shapes(config: RunnerConfig, bucket: Bucket) -> dict[str, Any]:
        """Return the shape of each field; a tuple of shapes for fields with one array per cache group."""
        decode, prefill = bucket.decode_rows, config.max_prefill_seqs if bucket.prefill_tokens else 0
        rows, speculates = (decode + prefill,), config.speculate is not None
        return {
            "decode_request_slots": (decode,),
            "decode_kv_lens": (decode,),
            "decode_tables": config.table_shapes(decode),
            "decode_limits": (decode if speculates else 0,),
            "decode_drafts": (decode if speculates else 0,),
            "prefill_ids": (bucket.prefill_tokens,),
            "cu_q_lens": (prefill + 1,),
            "prefill_kv_lens": (prefill,),
            "prefill_tables": config.table_shapes(prefill),
            "prefill_request_slots": (prefill,),
            "prefill_next": (prefill,),
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
            "seed": rows,
            "flags": rows,
            "penalties": (3, *rows),
            "extra": (len(_extra_names(config)), *rows),
            "shared_pages": (int(bucket.cascade),),
        }

    @classmethod
    def size(cls, config: RunnerConfig, bucket: Bucket) -> int:
        """Return the number of entries of the packed array."""
        return sum(map(math.prod, _each(cls._shapes(config, bucket).values())))

    @classmethod
    def of(cls, config: RunnerConfig, bucket: Bucket, packed: Any) -> PackedStep:
        """Split the packed array into the fields: views of a numpy array, or slices of a jax array."""
        shapes = cls._shapes(config, bucket)
        each = list(_each(shapes.values()))
        ends = itertools.accumulate(map(math.prod, each))
        arrays = (packed[end - math.prod(s) : end].reshape(s) for s, end in zip(each, ends, strict=True))
        return cls(
            **{
                name: tuple(itertools.islice(arrays, len(shape))) if isinstance(shape[0], tuple) else next(arrays)
                for name, shape in shapes.items()
            }
        )

    @classmethod
    def pack(cls, config: RunnerConfig, bucket: Bucket, plan: StepPlan, shared_pages: int = 0) -> np.ndarray:
        """Return the packed array, int32 [size], of a plan padded to the bucket. If `bucket.cascade`, `shared_pages` is
        the number of leading pages that all decode rows share."""
        packed = np.zeros((cls.size(config, bucket),), np.int32)
        step = cls.of(config, bucket, packed)
        for ids in (step.decode_request_slots, *step.decode_tables, *step.prefill_tables, step.prefill_request_slots):
            ids.fill(PAGE_NONE)
        step.shared_pages.fill(shared_pages)
        num_decode = len(plan.decode)
        for of_decode, of_prefill, tables in zip(step.decode_tables, step.prefill_tables, plan.tables, strict=True):
            of_decode[:num_decode] = tables[:num_decode].reshape(-1, *of_decode.shape[1:])
            of_prefill[: len(plan.prefill)] = tables[num_decode:].reshape(-1, *of_prefill.shape[1:])
        for i, row in enumerate(plan.decode):
            step.decode_request_slots[i], step.decode_kv_lens[i] = row.request_slot, row.start + 1
            if config.speculate is not None:
                step.decode_limits[i], step.decode_drafts[i] = row.limit, row.num_drafts
            step._set_sampling(i, row, config.logits_processor)
        end = 0
        for i, row in enumerate(plan.prefill):
            step.prefill_ids[end : end + row.num_tokens] = row.request.token_ids[row.start : row.start + row.num_tokens]
            end += row.num_tokens
            step.cu_q_lens[i + 1 :] = end
            step.prefill_kv_lens[i] = row.start + row.num_tokens
            step.prefill_request_slots[i] = row.request_slot if row.samples else PAGE_NONE
            step.prefill_next[i] = -1 if row.samples else row.request.token_ids[row.start + row.num_tokens]
            step._set_sampling(bucket.decode_rows + i, row, config.logits_processor)
        return packed

    def _set_sampling(self, i: int, row: ScheduledRow, processor: LogitsProcessor | None) -> None:
        params = row.request.params
        self.temperature.view(np.float32)[i] = params.temperature
        self.top_p.view(np.float32)[i] = params.top_p
        self.min_p.view(np.float32)[i] = params.min_p
        self.seed.view(np.uint32)[i] = params.seed
        self.top_k[i] = min(params.top_k, np.iinfo(np.int32).max)
        if row.samples and row.request.flags:
            self.flags[i] = row.request.flags
            penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            self.penalties.view(np.float32)[:, i] = penalties
        if processor is not None:
            self.extra.view(np.float32)[:, i] = processor.values(params.extra_args)

    def row_parameters(self) -> RowParameters:
        """Return the sampling parameters of each row, of the decode rows first. The position of the token to sample
        equals the number of tokens of the sequence before it."""
        return RowParameters(
            slots=jnp.concatenate([self.decode_request_slots, self.prefill_request_slots]),
            positions=jnp.concatenate([self.decode_kv_lens, self.prefill_kv_lens]),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            flags=self.flags,
            penalties=tuple(self.penalties),
            extra=tuple(self.extra),
        )

    def next_prompt_tokens(self) -> Int32[Array, "T"]:
        """Return the known token after each prefill token; -1 if it is sampled."""
        starts, ends, num_tokens = self.cu_q_lens[:-1], self.cu_q_lens[1:], self.prefill_ids.shape[0]
        last = jnp.where(starts < ends, ends - 1, num_tokens)
        return jnp.roll(self.prefill_ids, -1).at[last].set(self.prefill_next, mode="drop")

    def metadata(
        self, page_size: int, logit_rows: Int32[Array, "n"], drafting: StepMetadata | None = None
    ) -> StepMetadata:
        """Compute the model's metadata of the step, with position and cache slot of each token, on the device. A cache
        slot is the index of a token's place in the cache: page · page_size + offset.

        Args:
          page_size: tokens per page.
          logit_rows: indices of the tokens for which logits are computed.
          drafting: metadata of a step with only the decode rows, which have drafts. The result has these decode rows
            and the prefill rows of this step. None if decode rows have one token; the result then has all rows of this
            step.
        """
        parts, begun = self._parts(), () if drafting is None else (drafting.positions,)
        if drafting is not None:
            del parts["decode"]
        positions = [*begun, *(token_positions(cu, lens, length=length) for cu, lens, length in parts.values())]
        groups = []
        for i, (of_decode, of_prefill) in enumerate(zip(self.decode_tables, self.prefill_tables, strict=True)):
            tables = {"decode": of_decode, "prefill": of_prefill}
            slots = [] if drafting is None else [drafting.groups[i].slots]
            slots += [
                slot_mapping(tables[name], cu, lens, page_size=page_size, length=length)
                for name, (cu, lens, length) in parts.items()
            ]
            groups.append(GroupTables(jnp.concatenate(slots), of_decode, of_prefill))
        return StepMetadata(
            positions=jnp.maximum(jnp.concatenate(positions), 0),
            groups=tuple(groups),
            decode_kv_lens=self.decode_kv_lens if drafting is None else drafting.decode_kv_lens,
            cu_q_lens=self.cu_q_lens,
            prefill_kv_lens=self.prefill_kv_lens,
            logit_rows=logit_rows,
            decode_q_lens=None if drafting is None else drafting.decode_q_lens,
            decode_queries=1 if drafting is None else drafting.decode_queries,
            decode_draft_mask=None if drafting is None else drafting.decode_draft_mask,
            shared_pages=self.shared_pages[0] if self.shared_pages.size else None,
        )

    def _parts(self) -> dict[str, tuple[Any, Any, int]]:
        """Return (prefix sums of new tokens, sequence lengths, number of tokens) of the decode rows and of the prefill
        rows, without parts that have no rows."""
        num_decode, num_prefill = self.decode_request_slots.shape[0], self.prefill_ids.shape[0]
        decode_cu = jnp.arange(num_decode + 1, dtype=jnp.int32)
        parts = {
            "decode": (decode_cu, self.decode_kv_lens, num_decode),
            "prefill": (self.cu_q_lens, self.prefill_kv_lens, num_prefill),
        }
        return {name: part for name, part in parts.items() if part[2]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParameters:
    """Sampling parameters of n rows of logits. All fields are int32 [n].

    The forward program of a step returns them in one array, `pack`, for the program that samples.

    Attributes:
      slots: request slot of the sampled token; -1 if no token is sampled.
      positions: position of the sampled token in its sequence.
      temperature, top_k, top_p, min_p, seed, flags: as in `PackedStep`.
      penalties, extra: the rows of the fields of `PackedStep`.
    """

    slots: Any
    positions: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    flags: Any
    penalties: tuple[Any, ...]
    extra: tuple[Any, ...]

    @staticmethod
    def size(config: RunnerConfig, num_rows: int) -> int:
        """Return the number of entries of the packed array."""
        return (8 + 3 + len(_extra_names(config))) * num_rows

    def pack(self) -> Int32[Array, "m"]:
        """Return all fields in one array."""
        return jnp.concatenate(jax.tree.leaves(self))

    @classmethod
    def of(cls, config: RunnerConfig, packed: Int32[Array, "m"]) -> RowParameters:
        """Split the packed array into the fields."""
        fields = packed.reshape(8 + 3 + len(_extra_names(config)), -1)
        return cls(*fields[:8], penalties=tuple(fields[8:11]), extra=tuple(fields[11:]))

    def sampling_rows(self) -> SamplingRows:
        """Return the parameters of the draw."""
        return SamplingRows(
            temperature=_floats(self.temperature),
            top_k=self.top_k,
            top_p=_floats(self.top_p),
            min_p=_floats(self.min_p),
            seed=jax.lax.bitcast_convert_type(self.seed, jnp.uint32),
            position=self.positions,
        )

    def edit_rows(self, config: RunnerConfig, masks: UInt32[Array, "n W"]) -> EditRows:
        """Return the parameters that change logits.

        Args:
          config: sizes and logits processor.
          masks: bit masks of allowed tokens; ignored for rows without a token filter.
        """
        repetition, presence, frequency = map(_floats, self.penalties)
        return EditRows(
            slots=self.slots,
            flags=self.flags,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            extra=dict(zip(_extra_names(config), map(_floats, self.extra), strict=True)),
            masks=masks,
        )


def _extra_names(config: RunnerConfig) -> tuple[str, ...]:
    """Return the names of the arguments of the logits processor."""
    return () if config.logits_processor is None else tuple(config.logits_processor.defaults)


def _floats(bits: Int32[Array, "n"]) -> Float[Array, "n"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _each(shapes: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield all shapes, including shapes in tuples of shapes."""
    for shape in shapes:
        yield from _each(shape) if isinstance(shape[0], tuple) else (shape,)
