"""KV-cache transfer of one engine: export and import of pages, pages that arrive, and pages reported as written.

`Engine` has methods with the same names, which call the methods of `EngineTransfers`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_attn import PAGE_NONE
from pallas_attn.cache import GroupPools, Prefix, PrefixCache
from pallas_attn.models.decoder.mesh import spans_processes
from pallas_attn.models.engine.config import EngineConfig
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cached_pages import (
    ROWS_PER_COPY,
    CachedPages,
    CachedSequence,
    difference,
    joined,
    numbered,
)
from pallas_attn.models.engine.kv_transfer.fields import UNLIMITED, Integer, ObjectOf, TextUpTo, check_field
from pallas_attn.models.engine.kv_transfer.incoming_pages import IncomingPages
from pallas_attn.models.engine.kv_transfer.written_pages import WrittenFeed, WrittenLayer
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.request_checks import checked_ids
from pallas_attn.models.engine.runner import Runner, StepResult
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.tracked_request import TrackedRequest


class EngineTransfers:
    """Transfers pages between the caches of an engine and the host.

    Attributes:
      feed: reports pages to a consumer as they are written; None before `watch`.
      incoming: receivers of the pages of prompts that another engine computes. Closed receivers are removed.
      awaited: requests, each with the receiver of its pages. The receiver is closed once the request has been admitted
        or has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[GroupSizes],
        pools: Sequence[GroupPools],
        prefix_caches: Sequence[PrefixCache],
        runner: Runner,
        changing: Callable[[], contextlib.AbstractContextManager[None]],
        *,
        vocab_size: int,
        max_len: int,
    ):
        """Start without transfers.

        Args:
          config: the configuration of the engine.
          groups: cache groups.
          pools: page pools of each data rank.
          prefix_caches: prefix cache of each data rank; empty without prefix caching.
          runner: reads and writes the device's caches.
          changing: bound method that returns a context manager for a change of the engine. If an exception ends the
            block, the next change first clears all caches. Arguments are therefore checked before the block.
          vocab_size: number of tokens of the vocabulary.
          max_len: maximum number of tokens of a sequence.
        """
        self._config, self._groups, self._pools = config, tuple(groups), tuple(pools)
        self._prefix_caches, self._runner = tuple(prefix_caches), runner
        self._vocab_size, self._max_len = vocab_size, max_len
        # A strong reference would form a cycle, which keeps the engine's device memory until garbage collection.
        self._weak_changing = weakref.WeakMethod(changing)
        self.feed: WrittenFeed | None = None
        self.incoming: list[IncomingPages] = []
        self.awaited: list[tuple[TrackedRequest, IncomingPages]] = []

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        changing = self._weak_changing()
        if changing is None:
            raise RuntimeError("engine: expected an engine that exists, but it was deleted")
        return changing()

    @property
    def is_watched(self) -> bool:
        """Whether a feed is open."""
        return self.feed is not None and self.feed.is_open

    @functools.cached_property
    def cache_format(self) -> dict[str, Any]:
        """See `Engine.cache_format`."""
        groups = [[g.layers, g.heads.window, g.heads.sink_tokens, g.head_wise] for g in self._groups]
        return json.loads(json.dumps(self._runner.cache_format() | {"groups": groups}))

    def check_idle(self) -> None:
        """Raise NotImplementedError if pages are received or reported. These pages belong to the present weights, so
        the weights cannot be replaced."""
        if self.is_watched:
            raise NotImplementedError(
                "weights: the consumer of watch_written expects pages of the present weights; close the feed first"
            )
        if any(incoming.is_open for incoming in self.incoming):
            raise NotImplementedError(
                "weights: pages of the present weights arrive (receive_pages); finish or close their receivers first"
            )

    def replace_weights(self) -> None:
        """Compute the digest of the weights in `cache_format` again, when it is needed next."""
        self.__dict__.pop("cache_format", None)

    # --- export and import

    def intact_prefix_caches(self) -> tuple[PrefixCache, ...]:
        """Return the prefix caches of all data ranks. If an interrupted call lost the contents of pages, clear them.

        Raises:
          ValueError: the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        if not self._prefix_caches:
            raise ValueError("prefix_caching: expected True, because pages are found through the prefix cache")
        if spans_processes(self._config.mesh):
            raise NotImplementedError("processes: pages on devices of other processes can be neither read nor written")
        with self._changing():
            return self._prefix_caches

    def export_pages(self, request: Request) -> CachedPages:
        """Copy pages of a running or finished request to the host. `import_pages` of another engine adds them to its
        prefix cache, so it computes only the rest of the request.

        Only full pages are copied: the pages from the first token of the request up to the first page that is not
        computed or no longer in the cache.

        Raises:
          ValueError: the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        # A lookup leaves out the page of the last token. The extra token 0 makes it include all pages of the request.
        found = [cache.lookup([*request.token_ids, 0], request.salt) for cache in self.intact_prefix_caches()]
        rank = max(range(len(found)), key=lambda rank: found[rank][0].shape[1])  # the rank with the longest prefix
        return self._export({rank: [(request.token_ids, request.salt, found[rank])]})

    def export_prefix_cache(self) -> CachedPages:
        """Copy all pages of the prefix cache to the host, for example to store them until the next start.

        Raises:
          ValueError: the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        return self._export(
            {
                rank: [(tokens, salt, cache.published(tokens, salt)) for tokens, salt in cache.sequences()]
                for rank, cache in enumerate(self.intact_prefix_caches())
            }
        )

    def _export(self, found_on_ranks: Mapping[int, Iterable[tuple[Sequence[int], str, Prefix]]]) -> CachedPages:
        """Copy pages to the host.

        Args:
          found_on_ranks: for each data rank, the tokens, the salt and the page rows of each prefix.
        """
        page_size, parts = self._config.page_size, []
        for rank, found in found_on_ranks.items():
            taken = [CachedSequence(tuple(t[: r[0].shape[1] * page_size]), salt, r) for t, salt, r in found]
            sequences, held = numbered([each for each in taken if each.tokens], len(self._groups))
            rows = zip(self._groups, held, strict=True)
            parts.append((sequences, [self._runner.read_rows(group, of_group, rank) for group, of_group in rows]))
        return CachedPages(self.cache_format, *joined(parts))

    def import_pages(self, pages: CachedPages) -> int:
        """Copy pages of another engine into free pages of this cache, on every data rank, and add them to the prefix
        cache, where later requests find them.

        Both engines need the same model and the same `cache_format`. The number of pages, the step sizes, the attention
        implementations and the number of devices may differ. If the KV heads of a layer have different windows, both
        engines need the same number of KV heads per device. Caches of draft proposers are not copied. Therefore fewer
        drafts are accepted at first for requests with imported pages.

        Returns:
          Number of tokens of the imported sequences that requests would now find in the prefix cache, whatever data
          rank they run on. It is less than the number of tokens in `pages` if there were too few free pages.

        Raises:
          ValueError: `pages` are malformed or their engine has another `cache_format`; nothing is added. Or this engine
            was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        caches = self.intact_prefix_caches()
        if not isinstance(pages, CachedPages):
            raise ValueError(f"pages: expected CachedPages, got a {type(pages).__name__}")
        check_field("pages.made_for", pages.made_for, ObjectOf())
        if (unlike := difference(pages.made_for, self.cache_format)) is not None:
            raise ValueError(f"pages: expected pages of an engine like this one, got {unlike}")
        formats = [self._runner.row_format(group) for group in self._groups]
        pages.check(self._config.page_size, self._vocab_size, formats)
        for sequence, (rank, cache) in itertools.product(pages.sequences, enumerate(caches)):
            with self._changing():
                known = [rows != PAGE_NONE for rows in sequence.rows]
                self._write_pages(pages, sequence, cache.insert(sequence.tokens, known, sequence.salt), rank)
        hits = (
            min(cache.lookup([*sequence.tokens, 0], sequence.salt)[0].shape[1] for cache in caches)
            for sequence in pages.sequences
        )
        return sum(hits) * self._config.page_size

    def _write_pages(self, pages: CachedPages, sequence: CachedSequence, rows: Prefix, rank: int) -> None:
        """Write the pages of a sequence.

        Args:
          pages: the imported pages.
          sequence: the sequence in `pages`.
          rows: for each cache group, the row numbers to write; PAGE_NONE for pages that are not written.
          rank: data rank of the rows.
        """
        for group, contents, theirs, own in zip(self._groups, pages.groups, sequence.rows, rows, strict=True):
            given = own != PAGE_NONE
            new = {name: array[theirs[given]] for name, array in contents.items()}
            self._runner.write_rows(group, own[given], new, rank)

    def num_cached_tokens(self, prompt_ids: Sequence[int], salt: str) -> int:
        """See `Engine.num_cached_tokens`."""
        with self._changing():
            found = [cache.lookup(prompt_ids, salt)[0].shape[1] for cache in self._prefix_caches]
        return max(found, default=0) * self._config.page_size

    # --- pages that arrive from another engine

    def receive_pages(
        self, tokens: Sequence[int], made_for: Mapping[str, Any], salt: str, num_unfinished: Sequence[int] = (0,)
    ) -> IncomingPages:
        """Make a receiver for the pages of a prompt that another engine computes. The pages arrive layer by layer.

        The engines may run on different meshes. On several data ranks, the pages are written into the caches of one
        rank: the rank with the fewest unfinished requests and open receivers without a request. The request of the
        prompt runs on this rank.

        Args:
          tokens: token ids of the prompt.
          made_for: `cache_format` of the other engine.
          salt: salt of the request.
          num_unfinished: number of unfinished requests of each data rank.

        Returns:
          The receiver of the pages. Pass it to `Engine.add_request` as `incoming`, or close it.

        Raises:
          ValueError: `made_for` differs from this engine's `cache_format`; `tokens` has invalid ids or is longer than
            `Engine.max_sequence_len`; or the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes, or a layer of the model is in several cache groups
            (DeepSeek-V4).
        """
        self._check_layers()
        caches = self.intact_prefix_caches()
        check_field("made_for", made_for, ObjectOf())
        if (unlike := difference(made_for, self.cache_format)) is not None:
            raise ValueError(f"made_for: expected an engine like this one, got {unlike}")
        check_field("salt", salt, TextUpTo(UNLIMITED))
        ids = checked_ids("tokens", tokens, self._vocab_size)
        if len(ids) > self._max_len:
            raise ValueError(f"tokens: expected at most {self._max_len}, got {len(ids)}")
        queued = [incoming for _, incoming in self.awaited]
        unqueued = [one.rank for one in self.incoming if one.is_open and one not in queued]
        rank = min(range(len(caches)), key=lambda rank: num_unfinished[rank] + unqueued.count(rank))
        pools = self._pools[rank]
        incoming = IncomingPages(ids, salt, self._groups, pools, caches[rank], self._runner, self._changing, rank)
        self.incoming.append(incoming)
        return incoming

    def compile_page_writes(self) -> None:
        """See `Engine.compile_page_writes`."""
        sizes = [2**n for n in range(ROWS_PER_COPY.bit_length())]
        for group, size in itertools.product(self._groups, sizes):
            rows = np.full(size, np.iinfo(np.int32).max, np.int32)  # outside the cache: nothing is written
            for layer, arrays in self._runner.row_format(group).of_layers().items():
                contents = {name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in arrays.items()}
                with self._changing():
                    self._runner.write_layer(group, layer, rows, contents, rank=0)

    def rank_of(self, incoming: IncomingPages) -> int | None:
        """Return the data rank that holds the pages of a receiver; None if the receiver is closed.

        Raises:
          ValueError: the receiver belongs to another engine.
        """
        if not incoming.is_open:
            return None
        if incoming not in self.incoming:
            raise ValueError("incoming: expected a receiver of this engine, got a receiver of another engine")
        return incoming.rank

    def remove_closed(self) -> None:
        """Remove closed receivers from `incoming`."""
        self.incoming = [incoming for incoming in self.incoming if incoming.is_open]

    def give_up_incoming(self, rank: int) -> None:
        """Release the page rows of all receivers of a data rank in `incoming`."""
        for incoming in self.incoming:
            if incoming.rank == rank:
                incoming.lose()

    def close_found(self) -> None:
        """Close the receivers of requests that have been admitted or have ended."""
        found = [one for one in self.awaited if one[0].request.num_cached is not None or one[0].finish_reason]
        if found:
            self.awaited = [one for one in self.awaited if one not in found]
            for _, incoming in found:
                if incoming.is_open:
                    incoming.lose()

    # --- pages reported as written

    def watch_written(self, consumer: Callable[[WrittenLayer], object], max_bytes: int, pieces: int) -> WrittenFeed:
        """Copy each page that a prefill row fills to the host, layer by layer, and pass it to a consumer, from the next
        step on.

        Each step whose prefill rows fill a page is then launched as several programs, each with consecutive layers.
        Pages of the first layers are copied to the host while later layers compute. All other steps run as before.
        Logits of the several programs equal the logits of the single program up to rounding.

        `WrittenLayer` describes one call of the consumer and the order of the calls. Pages that a request found in the
        prefix cache are passed to the consumer together with the first page that the request fills.

        Args:
          consumer: function called on a thread of the feed. It must not call the engine. No step waits for it.
          max_bytes: maximum bytes of page copies that the consumer has not processed. The feed ends if a step would
            exceed this limit. A single step may exceed it if the consumer has processed all earlier copies.
          pieces: maximum number of layer ranges of a step. Each range is one program. Two more programs compute the
            embedding and the logits. More ranges deliver pages earlier and make the step slower. If there is a range
            for each layer, the pages of each layer are copied while the next layer computes.

        Returns:
          The feed. Its methods wait for pages, report its state and close it.

        Raises:
          ValueError: the engine already has an open feed, or an argument has the wrong type or value.
          NotImplementedError: the engine runs as several processes, with drafts, or with batch-invariant steps; or a
            layer of the model is in several cache groups (DeepSeek-V4).
        """
        self._check_watch(consumer, max_bytes, pieces)
        self._runner.cut_steps(pieces)
        groups = {layer: number for number, group in enumerate(self._groups) for layer in group.layers}
        row_bytes = {
            layer: sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays.values())
            for group in self._groups
            for layer, arrays in self._runner.row_format(group).of_layers().items()
        }
        layers = sorted(groups)
        self.feed = WrittenFeed(
            consumer,
            [groups[layer] for layer in layers],
            [row_bytes[layer] for layer in layers],
            self._pools,
            max_bytes,
        )
        return self.feed

    def _check_watch(self, consumer: Callable[[WrittenLayer], object], max_bytes: int, pieces: int) -> None:
        """Raise ValueError or NotImplementedError as `watch_written`."""
        if not callable(consumer):
            raise ValueError(f"consumer: expected a function, got {consumer!r}")
        check_field("max_bytes", max_bytes, Integer(1))
        check_field("pieces", pieces, Integer(1))
        self._check_layers()
        if self.is_watched:
            raise ValueError("consumer: the engine already has an open feed; close it first")
        if spans_processes(self._config.mesh):
            raise NotImplementedError("processes: pages on devices of other processes cannot be read")
        if self._config.speculate is not None:
            raise NotImplementedError("speculate: proposers need whole steps, not steps launched layer by layer")
        if self._config.batch_invariant:
            raise NotImplementedError(
                "batch_invariant: steps launched layer by layer are different programs, which may round differently"
            )

    def _check_layers(self) -> None:
        """Raise NotImplementedError if a layer is in several cache groups: feeds and receivers have one per layer."""
        if any(group.caches for group in self._groups):
            raise NotImplementedError(
                "model: pages can be transferred layer by layer only if each layer is in one cache group, and layers of"
                " this model are in several; export_pages and import_pages support this model"
            )

    def launch(self, plans: Sequence[StepPlan | None], capture_logits: bool) -> StepResult:
        """Launch a step.

        If a feed is open and has pages of this step to report, launch the step as several programs, and copy the pages
        after each program.
        """
        feed = self.feed
        step = None if feed is None else feed.plan(plans)
        if feed is None or step is None:
            return self._runner.launch(plans, capture_logits)
        on_layer = functools.partial(feed.add, step)
        result = self._runner.launch(plans, capture_logits, rows=step.rows, on_layer=on_layer)
        feed.launched(step)
        return result

    def start_over(self) -> None:
        """Close all receivers, and report all pages again, because the caches were lost.

        An exception may interrupt this method at any point. It may then be called again.
        """
        if self.feed is not None:
            self.feed.start_over()
        for incoming in self.incoming:
            incoming.lose(dropping=False)
        self.incoming = []
