"""Sizes and policies of the engine, and the static step sizes derived from them."""

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
      num_pages: pages of every layer if the memory is divided evenly. Layers with windows need fewer pages, and other
        layers get the rest (see `group_sizes`).
      page_size: tokens per page.
      max_batched_tokens: maximum number of new tokens per step, decode and prefill together.
      max_num_seqs: maximum number of running requests; others wait.
      max_prefill_seqs: maximum number of prompts per step; None for the smaller of max_num_seqs and 8.
      max_model_len: maximum number of tokens per sequence, prompt and output together; None for the model's limit.
      chunked_prefill: whether a prompt may be split over several steps.
      prefix_caching: whether requests with equal prefixes share pages.
      recycling: whether pages before a window are released while a request runs; changes no token.
      cache_dtype: dtype of latents, or of keys and values; None for the model's dtype. float8_e4m3fn is
        possible for both, int8 for keys and values.
      kv_scales: static scales of quantised keys and values; None for one scale per token and head.
      decode_buckets, prefill_buckets: sizes to which steps are padded, each compiled once; None for powers of 2 and of
        4. A step takes fewer prompt tokens if padding to the next size would cost more than a further step.
      batch_invariant: whether a request's logits and tokens have the same bits whatever other requests run, however its
        prompt is split, and whether tokens come from the prefix cache. All steps then have the largest shape, and
        prompts attend token by token, which costs time. The bits depend on the sizes in this class except num_pages.
      speculate: proposer of drafts and number of drafts per step; None for plain decoding. Drafts change no token, and
        do not count in max_batched_tokens.
      history: number of newest finished requests, and of newest steps, whose records are stored; None for all.
      mesh: devices that run each step together; the model must be loaded for the same mesh. Heads, hidden widths and
        vocabulary are split over the axes tensor and expert, experts over data and expert, and the tokens of each page
        over context. Sizes in this class apply to each data rank, which has its own requests; pages apply to each
        device. None for one device.

    Raises:
      ValueError: a size is out of range, the last bucket is not the required size, there are several buckets although
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
                f"num_pages: expected fewer than 2**31 tokens in total, because cache slots are int32; got"
                f" {self.num_pages} pages of {self.page_size}"
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
        """Return the static sizes of the runner; `groups` is None for one cache group of all layers."""
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
        """Maximum number of prefill rows per step."""
        return self.max_prefill_seqs or min(self.max_num_seqs, 8)


def _powers(base: int, first: int, last: int) -> tuple[int, ...]:
    """Return first, first · base, first · base², ... below last, and last."""
    below = itertools.takewhile(lambda size: size < last, (first * base**i for i in itertools.count()))
    return (*below, last)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Static sizes of a step, which determine the compiled program.

    Attributes:
      decode_rows: Bd, number of decode rows including padding.
      prefill_tokens: number of prefill tokens including padding.
      all_logits: whether logits of every prefill token are returned; otherwise only the logits used for sampling are
        computed.
      num_drafts: drafts per decode row including padding.
    """

    decode_rows: int
    prefill_tokens: int
    all_logits: bool = False
    num_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Sizes that the runner allocates and compiles for.

    Attributes:
      num_pages, page_size: pages of every layer's cache and tokens per page. `groups` have their own number of pages.
      table_pages: maximum number of pages per sequence.
      max_num_seqs: maximum number of running requests.
      max_prefill_seqs: maximum number of prefill rows per step.
      decode_buckets, prefill_buckets: sizes to which steps are padded, ascending; the last size is the maximum.
      cache_dtype: dtype of latents, or of keys and values; None for the model's dtype.
      kv_scales: static scales of quantised keys and values; None for one scale per token and head.
      groups: the model's cache groups; None for one group of all layers with tables of page ids.
      batch_invariant: whether all steps use one bucket, in which a row's bits do not depend on other rows.
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
        """Numbers of drafts to which decode rows are padded, ascending."""
        return (0,) if self.speculate is None else self.speculate.draft_buckets

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Return every bucket that a step may use.

        Steps with decode rows and prompts are padded to the largest number of decode rows, and to the smallest or
        largest number of drafts. Idle decode rows cost little compared with the prefill, and compiling every
        combination would take too long. Batch-invariant steps all use the largest bucket, because programs of different
        shapes round differently.
        """
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
        """Sizes of the largest step, as an argument of `explain_attention`."""
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
        """Shapes of the page tables of `rows` sequences, one for each cache group."""
        heads = [(g.num_heads,) if g.head_wise else () for g in self.groups] if self.groups else [()]
        return tuple((rows, *of_heads, self.table_pages) for of_heads in heads)

    @property
    def empty_tables(self) -> tuple[np.ndarray, ...]:
        """Page tables of a plan without rows."""
        shapes = self.table_shapes(0)
        return tuple(np.zeros((0, *(heads or (1,)), pages), np.int32) for _, *heads, pages in shapes)

    def layer_pages(self, num_layers: int) -> list[int]:
        """Number of pages of each layer's cache."""
        pages = {layer: group.num_pages for group in self.groups or () for layer in group.layers}
        return [pages.get(layer, self.num_pages) for layer in range(num_layers)]
