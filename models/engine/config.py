"""Sizes and policies of the engine, and the static sizes of its steps that follow from them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.decoder import KVScales, StepSizes, normal_mesh
from models.engine.group_sizes import GroupSizes
from models.engine.speculation.proposer import Speculation


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that the engine allocates, and its scheduling policies.

    Attributes:
      num_pages: pages of every layer if the memory were divided evenly; layers that see less of a sequence leave theirs
        to the others (see `group_sizes`).
      page_size: tokens a page holds.
      max_batched_tokens: new tokens of a step, decode and prefill together.
      max_num_seqs: requests that run at once; others wait.
      max_prefill_seqs: requests whose prompts one step computes; None for max_num_seqs, but at most 8.
      max_model_len: tokens of a sequence, prompt and output; None for the model's own limit.
      chunked_prefill: whether a prompt may be spread over steps.
      prefix_caching: whether pages of equal prefixes are shared.
      recycling: whether pages that windows leave behind are given back while a request runs; changes no token.
      cache_dtype: of latents or keys and values; None for the model's dtype. It may also be float8_e4m3fn or, of keys
        and values, int8.
      kv_scales: static scales of quantised keys and values; None for one a token and head.
      decode_buckets, prefill_buckets: sizes a step is padded to, each compiled once; None for powers of 2 and of 4. A
        step ends at one of `prefill_buckets` where padding to the next would cost more than another step.
      batch_invariant: whether a request's logits and tokens are the same bits in any company: whatever runs beside it,
        however its prompt is cut, found in the cache or computed again. Every step then has one shape, that of the
        largest, and prompts attend token by token, both of which cost time. Bits do depend on the sizes here, but for
        num_pages.
      speculate: what proposes drafts, and how many a step verifies; None for plain decoding. Drafts change no token,
        and are not counted in max_batched_tokens.
      history: finished requests, and steps, whose records are kept: the newest; None for all of them.
      mesh: devices that run each step together, those that the model was loaded for: heads, hidden widths and
        vocabulary are split over its axes tensor and expert, experts over data and expert, the tokens of each page over
        context. Sizes here are those of each rank along data, which has requests of its own; pages are those of each
        device. None for one device.

    Raises:
      ValueError: a size is out of range, buckets do not reach the sizes they must, there are several although
        steps are batch-invariant, or the mesh has an unknown axis.
    """

    num_pages: int = 512
    page_size: int = 64
    max_batched_tokens: int = 512
    max_num_seqs: int = 16
    max_prefill_seqs: int | None = None
    max_model_len: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    recycling: bool = True
    cache_dtype: DTypeLike | None = None
    kv_scales: KVScales | None = None
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    batch_invariant: bool = False
    history: int | None = 1024
    speculate: Speculation | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None:
            normal_mesh(self.mesh)
        if self.speculate is not None and not isinstance(self.speculate, Speculation):
            raise ValueError(f"speculate: expected a Speculation or None, got {self.speculate!r}")
        for name in ("num_pages", "page_size", "max_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("max_prefill_seqs", "history"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1 or None, got {getattr(self, name)}")
        if self.num_pages * self.page_size >= 2**31:
            raise ValueError(
                f"num_pages: expected fewer than 2**31 tokens in all, which slots number in int32; got {self.num_pages}"
                f" pages of {self.page_size}"
            )
        if self.max_num_seqs > self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs: expected at most max_batched_tokens={self.max_batched_tokens}, so that every running"
                f" request can decode in one step; got {self.max_num_seqs}"
            )
        for name, reach in (("decode_buckets", self.max_num_seqs), ("prefill_buckets", self.max_batched_tokens)):
            buckets = getattr(self, name)
            if buckets is None:
                continue
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != reach:
                raise ValueError(f"{name}: expected ascending sizes from 1 or more up to {reach}, got {buckets}")
            if self.batch_invariant and len(buckets) > 1:
                raise ValueError(f"{name}: expected None or ({reach},) if batch_invariant, got {buckets}")

    def runner_config(self, max_model_len: int, groups: tuple[GroupSizes, ...] | None = None) -> RunnerConfig:
        """Makes the static sizes of the device's side, for one cache group unless given others."""
        table_pages = -(-max_model_len // self.page_size)
        decode, prefill = (self.max_num_seqs,), (self.max_batched_tokens,)
        if not self.batch_invariant:
            decode = self.decode_buckets or _powers(2, 1, self.max_num_seqs)
            prefill = self.prefill_buckets or _powers(4, 32, self.max_batched_tokens)
        return RunnerConfig(
            num_pages=self.num_pages,
            page_size=self.page_size,
            table_pages=table_pages if groups or self.batch_invariant else min(self.num_pages, table_pages),
            max_num_seqs=self.max_num_seqs,
            max_prefill_seqs=self.prefill_seqs,
            decode_buckets=decode,
            prefill_buckets=prefill,
            batch_invariant=self.batch_invariant,
            cache_dtype=self.cache_dtype,
            kv_scales=self.kv_scales,
            groups=groups,
            speculate=self.speculate,
        )

    @property
    def prefill_seqs(self) -> int:
        """Prefill rows of a step."""
        return self.max_prefill_seqs or min(self.max_num_seqs, 8)


def _powers(base: int, first: int, last: int) -> tuple[int, ...]:
    """first, first·base, ... and last."""
    below = itertools.takewhile(lambda size: size < last, (first * base**i for i in itertools.count()))
    return (*below, last)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Static sizes of a step, which determine the compiled program.

    Attributes:
      decode_rows: Bd, decode tokens with padding.
      prefill_tokens: prefill tokens with padding.
      all_logits: whether the logits of every prefill token are computed and returned, not only of those that sample.
      num_drafts: drafts of each decode row, with padding.
    """

    decode_rows: int
    prefill_tokens: int
    all_logits: bool = False
    num_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Sizes that the runner allocates and compiles for.

    Attributes:
      num_pages, page_size: of every layer's cache, unless `groups` have pages of their own.
      table_pages: pages a sequence can have.
      max_num_seqs: running requests.
      max_prefill_seqs: prefill rows of a step.
      decode_buckets, prefill_buckets: sizes steps are padded to, ascending; the last ones bound a step.
      cache_dtype: of latents or keys and values; None for the model's dtype.
      kv_scales: static scales of quantised keys and values; None for one a token and head.
      groups: the model's cache groups; None for one, of all layers and with tables of page ids.
      batch_invariant: whether all steps are one bucket, in which a row has the same bits in any company.
      speculate: policy of speculative decoding; None for decode rows of one token.
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
    batch_invariant: bool = False
    speculate: Speculation | None = None

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Numbers of drafts that decode rows are padded to, ascending."""
        return (0,) if self.speculate is None else self.speculate.draft_buckets

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Every bucket that a step can fall into. Steps that mix decode and prefill pad to the largest decode size:
        their prefill costs more than idle decode rows, and compiling every combination would cost far more; for the
        same reason they have the fewest drafts or the most. Batch-invariant steps are all of the largest one, since a
        program of another shape rounds differently."""
        drafts, largest = self.draft_buckets, self.decode_buckets[-1]
        if self.batch_invariant:
            return [Bucket(largest, self.prefill_buckets[-1], all_logits, drafts[-1])]
        decode_only = [Bucket(d, 0, num_drafts=n) for n in drafts for d in self.decode_buckets]
        prefill_only = [Bucket(0, t, all_logits) for t in self.prefill_buckets]
        ends = sorted({drafts[0], drafts[-1]})
        mixed = [Bucket(largest, t, all_logits, n) for n in ends for t in self.prefill_buckets]
        return decode_only + prefill_only + mixed

    @property
    def largest_step(self) -> StepSizes:
        """The step that fills the largest buckets, in the form that `explain_attention` takes."""
        return StepSizes(
            num_pages=self.num_pages,
            page_size=self.page_size,
            table_pages=self.table_pages,
            decode_rows=self.decode_buckets[-1],
            prefill_tokens=self.prefill_buckets[-1],
            prefill_seqs=self.max_prefill_seqs,
            cache_dtype=self.cache_dtype,
            kv_scales=self.kv_scales,
            decode_queries=1 + self.draft_buckets[-1],
        )

    def table_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tables of so many sequences, one for each cache group."""
        heads = [(g.num_heads,) if g.head_wise else () for g in self.groups] if self.groups else [()]
        return tuple((rows, *of_heads, self.table_pages) for of_heads in heads)

    @property
    def empty_tables(self) -> tuple[np.ndarray, ...]:
        """Tables of a plan without rows."""
        shapes = self.table_shapes(0)
        return tuple(np.zeros((0, *(heads or (1,)), pages), np.int32) for _, *heads, pages in shapes)

    def layer_pages(self, num_layers: int) -> list[int]:
        """Pages of each layer's cache."""
        pages = {layer: group.num_pages for group in self.groups or () for layer in group.layers}
        return [pages.get(layer, self.num_pages) for layer in range(num_layers)]
