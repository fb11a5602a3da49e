"""Configuration of the engine: sizes, options, and the batch shapes for which steps are compiled.

A step is one forward pass over decode rows (newest tokens of requests) and prefill rows (chunks of prompts). A draft is
a guessed token after the newest token of a decode row, which a step verifies (speculation). A cache group is a set of
layers with equal attention windows.

A page row is the unit of cache allocation: one page of one KV head if the heads of a layer have different windows,
otherwise one page of all heads. The entries of a block table are indices of page rows; indices of pages of all heads
are called page ids.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_attn.models.decoder import KVScales, StepSizes, normal_mesh
from pallas_attn.models.decoder.caches import PageCount
from pallas_attn.models.decoder.mesh import DATA
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.logit_edits import LogitsProcessor
from pallas_attn.models.engine.speculation.proposer import Speculation


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that the engine allocates, and options of scheduling, caching and speculation.

    Attributes:
      num_pages: average number of pages per layer. If layers have different attention windows, layers with windows get
        fewer pages and other layers get more (see `group_sizes`).
      page_size: tokens per page.
      max_batched_tokens: maximum number of new tokens per step, decode and prefill together.
      max_num_seqs: maximum number of running requests; others wait. For sampling parameters, each running request has
        4 · (vocabulary size) + 12 KiB of memory on each device, whether or not it uses them.
      max_prefill_seqs: maximum number of prefill rows (prompt chunks) per step; None for the smaller of max_num_seqs
        and 8.
      max_model_len: maximum number of tokens per sequence, prompt and output together; None for the model's limit.
      chunked_prefill: whether a prompt may be split over several steps.
      prefix_caching: whether requests with equal prefixes share pages.
      recycling: whether a running request releases pages that lie before the attention window of all later queries. It
        changes no token.
      cache_dtype: dtype of the cached keys and values, or of the cached latents (MLA); None for the model's dtype.
        float8_e4m3fn is supported for both, int8 only for keys and values.
      kv_scales: static scales of quantised keys and values. None for scales that are computed when a token is written:
        one per token and KV head.
      decode_buckets: numbers of decode rows to which steps are padded, ascending, the last one equal to max_num_seqs.
        None for 1, 4, 16, 32, 64, ... up to max_num_seqs, and max_num_seqs: fewer programs than with all powers of two.
        The cost of idle rows was not measured.
      prefill_buckets: numbers of prompt tokens to which steps are padded, ascending, the last one equal to
        max_batched_tokens. None for 32, 128, 512, ... (factor 4) up to max_batched_tokens, and max_batched_tokens.
        Without data parallelism, a step takes fewer prompt tokens if padding to the next size would cost more than
        another step. Steps are compiled once per padded shape.
      batch_invariant: whether logits and tokens of a request have the same bits in every run, independent of other
        requests, of the split of its prompt into chunks, and of the prefix cache. All steps are then padded to the
        largest shape, and every prompt token attends as a decode row, which is slower. The bits depend on all sizes in
        this class except num_pages.
      speculate: proposer of drafts and number of drafts per step; None for decoding without drafts. Drafts change no
        token. They do not count towards max_batched_tokens.
      max_logprobs: maximum of `SamplingParams.logprobs` and `SamplingParams.prompt_logprobs`. Steps compute this number
        of log probabilities if a request wants any.
      logits_processor: function of the user that changes the logits of every sampled token; None for none.
      history: number of finished requests, and of steps, whose records are stored. Older records are deleted. None to
        store all.
      mesh: devices that run each step together; the model must be loaded for the same mesh. None for one device. Heads
        are split over the axes tensor and expert; hidden columns of dense layers and the vocabulary over tensor, expert
        and context; experts over data and expert; and the tokens of each page over context. Each data rank (index along
        data) has its own requests. All sizes in this class are per data rank. Each device of a data rank has num_pages
        pages.
      separate_prefill: whether steps with prompt tokens and without decode rows have their own programs. If False, they
        run the programs of steps with both, with idle decode rows. This halves the number of programs for prompts, and
        steps without decode rows take longer.
      cascade_attention: whether decode steps call `cascade_decode` if all their sequences share leading pages, such as
        the prompt of `SamplingParams.n` samples or a system prompt, and a step then reads at least 192 MiB less per
        layer (`AttentionSettings.cascade_saved_bytes`). The operation reads the shared pages once instead of once per
        sequence. Layers with windows call `paged_decode`. A second program is compiled for each number of decode rows
        for which this can happen. None: True if the model supports it, without batch_invariant and speculate.
      freeze_objects: whether `Engine.warmup` ends with `gc.freeze`. Python's garbage collector then no longer examines
        the objects that exist, mostly of compiled programs, so full collections stall no step for long. This applies to
        all objects of the process: reference cycles among them are never freed.
      background_compilation: whether `Engine.warmup` returns when the programs of the largest shapes are compiled. They
        serve every step, with more padding. The other programs are compiled in a thread while steps run.

    Raises:
      ValueError: a size is out of range; buckets are not ascending or do not end at the required size; batch_invariant
        with several buckets; cascade_attention True with batch_invariant, because `cascade_decode` rounds differently,
        or with speculate, because its programs have no drafts; or the mesh has an unknown axis.
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
    max_logprobs: int = 20
    logits_processor: LogitsProcessor | None = None
    separate_prefill: bool = True
    cascade_attention: bool | None = None
    freeze_objects: bool = False
    background_compilation: bool = False

    def __post_init__(self) -> None:
        if self.mesh is not None:
            normal_mesh(self.mesh)
        if self.speculate is not None and not isinstance(self.speculate, Speculation):
            raise ValueError(f"speculate: expected a Speculation or None, got {self.speculate!r}")
        for name in ("num_pages", "page_size", "max_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.logits_processor is not None and not isinstance(self.logits_processor, LogitsProcessor):
            raise ValueError(f"logits_processor: expected a LogitsProcessor or None, got {self.logits_processor!r}")
        if not 0 <= self.max_logprobs <= 1000:
            raise ValueError(f"max_logprobs: expected 0 to 1000, got {self.max_logprobs}")
        for name in ("max_prefill_seqs", "history"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1 or None, got {getattr(self, name)}")
        for name, is_set in (("batch_invariant", self.batch_invariant), ("speculate", self.speculate is not None)):
            if self.cascade_attention and is_set:
                raise ValueError(f"cascade_attention: expected False with {name}, got True")
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
        """Return the sizes for which the runner allocates and compiles.

        Args:
          max_model_len: maximum number of tokens per sequence.
          groups: the model's cache groups (layers with equal windows); None for one group of all layers.
        """
        table_pages = -(-max_model_len // self.page_size)
        decode, prefill = (self.max_num_seqs,), (self.max_batched_tokens,)
        if not self.batch_invariant:
            few = powers(4, 1, min(self.max_num_seqs, 16))
            decode = self.decode_buckets or tuple(sorted({*few, *powers(2, 16, self.max_num_seqs)}))
            prefill = self.prefill_buckets or powers(4, 32, self.max_batched_tokens)
        return RunnerConfig(
            num_pages=self.num_pages,
            page_size=self.page_size,
            table_pages=table_pages if groups or self.batch_invariant else min(self.num_pages, table_pages),
            max_num_seqs=self.max_num_seqs,
            max_prefill_seqs=self.prefill_seqs,
            decode_buckets=decode,
            prefill_buckets=prefill,
            separate_prefill=self.separate_prefill,
            mixed_steps=self.max_num_seqs > 1 or self.num_data_ranks > 1,
            batch_invariant=self.batch_invariant,
            cache_dtype=self.cache_dtype,
            kv_scales=self.kv_scales,
            groups=groups,
            speculate=self.speculate,
            max_logprobs=self.max_logprobs,
            logits_processor=self.logits_processor,
            cascade_attention=False if self.speculate is not None else self.cascade_attention,
        )

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks: groups of devices with their own requests."""
        return 1 if self.mesh is None else self.mesh.shape.get(DATA, 1)

    @property
    def prefill_seqs(self) -> int:
        """Maximum number of prefill rows per step."""
        return self.max_prefill_seqs or min(self.max_num_seqs, 8)


def powers(base: int, first: int, last: int) -> tuple[int, ...]:
    """Return first, first · base, first · base², ... below last, and last."""
    below = itertools.takewhile(lambda size: size < last, (first * base**i for i in itertools.count()))
    return (*below, last)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Padded shape of a step's batch. The forward program of a step is compiled for each bucket.

    Attributes:
      decode_rows: Bd, number of decode rows including padding.
      prefill_tokens: number of prefill tokens including padding.
      all_logits: whether logits of every prefill token are returned; otherwise only the logits used for sampling are
        computed.
      num_drafts: drafts per decode row including padding.
      skips_layers: whether the last layers, which have no cache, are applied only to the tokens with logits. If they
        are, the forward program returns no hidden states of prefill tokens.
      cascade: whether all decode rows share leading pages, which `cascade_decode` reads once. The bucket then has
        neither prefill tokens nor drafts.
    """

    decode_rows: int
    prefill_tokens: int
    all_logits: bool = False
    num_drafts: int = 0
    skips_layers: bool = False
    cascade: bool = False


def _sizes(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.decode_rows, bucket.prefill_tokens, bucket.num_drafts


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Sizes that the runner allocates and compiles for.

    Attributes:
      num_pages: pages of every layer's cache if `groups` is None. Otherwise `GroupSizes.num_pages` has the number of
        pages of each group.
      page_size: tokens per page.
      table_pages: maximum number of pages per sequence.
      max_num_seqs: maximum number of running requests.
      max_prefill_seqs: maximum number of prefill rows per step.
      decode_buckets, prefill_buckets: numbers of decode rows, and of prefill tokens, to which steps are padded,
        ascending; the last number is the maximum.
      separate_prefill: as in `EngineConfig`.
      mixed_steps: whether a step may have decode rows and prompts. It may not if a single request runs at a time.
      cache_dtype: dtype of latents, or of keys and values; None for the model's dtype.
      kv_scales: static scales of quantised keys and values; None for one scale per token and head.
      groups: the model's cache groups; None for one group of all layers with tables of page ids.
      batch_invariant: whether all steps use the largest bucket, so that the bits of a row do not depend on other rows.
      speculate: proposer and number of drafts per decode row; None for decode rows of one token.
      max_logprobs: maximum number of likeliest tokens whose log probabilities are returned per token.
      logits_processor: function of the user that changes logits; None for none.
      cascade_attention: as in `EngineConfig`.
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
    separate_prefill: bool = True
    mixed_steps: bool = True
    batch_invariant: bool = False
    speculate: Speculation | None = None
    max_logprobs: int = 20
    logits_processor: LogitsProcessor | None = None
    cascade_attention: bool | None = None

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Numbers of drafts to which decode rows are padded, ascending."""
        return (0,) if self.speculate is None else self.speculate.draft_buckets

    def buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Return every bucket that a step may use.

        Steps with both decode rows and prompts are padded to the largest number of decode rows, and to the smallest or
        largest number of drafts. This limits the number of compiled programs, and idle decode rows cost little compared
        with the prefill. Without `separate_prefill`, steps without decode rows use the same buckets, all with the
        largest number of drafts. Batch-invariant steps all use the largest bucket, because programs of different shapes
        round differently.

        Args:
          all_logits: whether steps return the logits of every prefill token.
        """
        drafts, largest = self.draft_buckets, self.decode_buckets[-1]
        if self.batch_invariant:
            return [Bucket(largest, self.prefill_buckets[-1], all_logits, drafts[-1])]
        buckets = [Bucket(d, 0, num_drafts=n) for n in drafts for d in self.decode_buckets]
        if self.separate_prefill or not self.mixed_steps:
            buckets += [Bucket(0, t, all_logits) for t in self.prefill_buckets]
        if self.mixed_steps:
            ends = sorted({drafts[0], drafts[-1]}) if self.separate_prefill else drafts[-1:]
            buckets += [Bucket(largest, t, all_logits, n) for n in ends for t in self.prefill_buckets]
        return buckets

    def covering_buckets(self, all_logits: bool = False) -> list[Bucket]:
        """Return the largest of the `buckets` without prompts and the largest with prompts. Every step fits into one of
        them."""
        buckets = self.buckets(all_logits)
        of_kinds = [[bucket for bucket in buckets if bool(bucket.prefill_tokens) is kind] for kind in (False, True)]
        return [max(of_kind, key=_sizes) for of_kind in of_kinds if of_kind]

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

    def num_rows(self, bucket: Bucket) -> int:
        """Number of decode rows and prefill rows of a bucket, including padding."""
        return bucket.decode_rows + (self.max_prefill_seqs if bucket.prefill_tokens else 0)

    def num_logits(self, bucket: Bucket) -> int:
        """Number of rows of logits from which a step samples: one for each input of a decode row, then one for each
        prefill row, including padding."""
        return self.num_rows(bucket) + bucket.decode_rows * bucket.num_drafts

    def table_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the block tables of `rows` sequences for each cache group: [rows, P] of page ids, or
        [rows, Hkv, P] of page rows if the heads of the group have different windows."""
        heads = [(g.num_heads,) if g.head_wise else () for g in self.groups] if self.groups else [()]
        return tuple((rows, *of_heads, self.table_pages) for of_heads in heads)

    @property
    def empty_tables(self) -> tuple[np.ndarray, ...]:
        """Block tables of a plan without rows: int32 [0, heads, P] for each cache group."""
        shapes = self.table_shapes(0)
        return tuple(np.zeros((0, *(heads or (1,)), pages), np.int32) for _, *heads, pages in shapes)

    def layer_pages(self, num_layers: int) -> list[PageCount]:
        """Number of pages of each layer's cache: a tuple if the layer is in several cache groups."""
        pages: dict[int, list[int]] = {}
        for group in self.groups or ():
            for layer in group.layers:
                pages.setdefault(layer, []).append(group.num_pages)
        counts = (pages.get(layer, [self.num_pages]) for layer in range(num_layers))
        return [of_groups[0] if len(of_groups) == 1 else tuple(of_groups) for of_groups in counts]
