"""Metadata of a planned step as one array: packed on the host, taken apart on the device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from models.decoder import GroupTables, StepMetadata
from models.engine.config import Bucket, RunnerConfig
from models.engine.sampler import SamplingRows
from models.engine.step.plan import ScheduledRow, StepPlan
from pallas_attn import PAGE_NONE, slot_mapping, token_positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A step's metadata. It travels to the device as one int32 array, because every transfer has its own latency.

    Attributes:
      decode_slots, decode_kv_lens, decode_tables: of Bd rows; slot -1 and length 0 for idle ones. Tables here and below
        are one for each cache group.
      decode_limits, decode_drafts: tokens that each sequence can have in the end, and drafts that there are pages for.
        These two and `prefill_next` are empty without speculation; with it, the device knows the length of a decode
        row, and `decode_kv_lens` has the least that it can be.
      prefill_ids, cu_q_lens, prefill_kv_lens, prefill_tables: tokens and their sequences.
      prefill_slots: where to keep the token sampled at the end of each prefill row; -1 if none is.
      prefill_next: the prompt's token after each prefill row; -1 if it is sampled.
      temperature, top_k, top_p, seed: of decode rows, then of prefill rows; floats and seeds by their bits.
    """

    decode_slots: Any
    decode_kv_lens: Any
    decode_tables: Any
    decode_limits: Any
    decode_drafts: Any
    prefill_ids: Any
    cu_q_lens: Any
    prefill_kv_lens: Any
    prefill_tables: Any
    prefill_slots: Any
    prefill_next: Any
    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any

    @staticmethod
    def _shapes(config: RunnerConfig, bucket: Bucket) -> dict[str, Any]:
        """Shape of each field; a tuple of shapes for fields that every cache group has one of."""
        decode, prefill = bucket.decode_rows, config.max_prefill_seqs if bucket.prefill_tokens else 0
        rows, speculates = (decode + prefill,), config.speculate is not None
        return {
            "decode_slots": (decode,),
            "decode_kv_lens": (decode,),
            "decode_tables": config.table_shapes(decode),
            "decode_limits": (decode if speculates else 0,),
            "decode_drafts": (decode if speculates else 0,),
            "prefill_ids": (bucket.prefill_tokens,),
            "cu_q_lens": (prefill + 1,),
            "prefill_kv_lens": (prefill,),
            "prefill_tables": config.table_shapes(prefill),
            "prefill_slots": (prefill,),
            "prefill_next": (prefill if speculates else 0,),
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
        """Unpacks an array into its fields, as views of it (numpy) or slices (jax)."""
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
            if config.speculate is not None:
                step.decode_limits[i], step.decode_drafts[i] = row.limit, row.num_drafts
            step._set_sampling(i, row)
        end = 0
        for i, row in enumerate(plan.prefill):
            step.prefill_ids[end : end + row.num_tokens] = row.request.token_ids[row.start : row.start + row.num_tokens]
            end += row.num_tokens
            step.cu_q_lens[i + 1 :] = end
            step.prefill_kv_lens[i] = row.start + row.num_tokens
            step.prefill_slots[i] = row.slot if row.samples else PAGE_NONE
            if config.speculate is not None:
                step.prefill_next[i] = -1 if row.samples else row.request.token_ids[row.start + row.num_tokens]
            step._set_sampling(bucket.decode_rows + i, row)
        return packed

    def _set_sampling(self, i: int, row: ScheduledRow) -> None:
        params = row.request.params
        self.temperature.view(np.float32)[i] = params.temperature
        self.top_p.view(np.float32)[i] = params.top_p
        self.seed.view(np.uint32)[i] = params.seed
        self.top_k[i] = min(params.top_k, np.iinfo(np.int32).max)

    def sampling_rows(self) -> SamplingRows:
        """Sampling parameters of each row; a sampled token's position is the number of tokens its sequence holds."""
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
        return SamplingRows(
            temperature=bits(self.temperature),
            top_k=self.top_k,
            top_p=bits(self.top_p),
            seed=jax.lax.bitcast_convert_type(self.seed, jnp.uint32),
            position=jnp.concatenate([self.decode_kv_lens, self.prefill_kv_lens]),
        )

    def metadata(
        self, page_size: int, logit_rows: Int32[Array, "n"], drafting: StepMetadata | None = None
    ) -> StepMetadata:
        """Computes positions, and slots in every cache group, of all tokens on the device.

        Args:
          page_size: tokens of a page.
          logit_rows: as `StepMetadata` has them.
          drafting: metadata of the decode rows with drafts, in place of rows of one token.
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
        )

    def _parts(self) -> dict[str, tuple[Any, Any, int]]:
        """Prefix sums of new tokens, lengths of sequences and number of tokens, for the parts that are not empty."""
        num_decode, num_prefill = self.decode_slots.shape[0], self.prefill_ids.shape[0]
        decode_cu = jnp.arange(num_decode + 1, dtype=jnp.int32)
        parts = {
            "decode": (decode_cu, self.decode_kv_lens, num_decode),
            "prefill": (self.cu_q_lens, self.prefill_kv_lens, num_prefill),
        }
        return {name: part for name, part in parts.items() if part[2]}


def _each(shapes: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, ...]]:
    """Yields shapes, and the shapes in tuples of shapes."""
    for shape in shapes:
        yield from _each(shape) if isinstance(shape[0], tuple) else (shape,)
