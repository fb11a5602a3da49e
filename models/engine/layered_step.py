"""A step as several programs, each of which computes some of the layers, so that pages of these can be copied while the
layers after them compute.

All outputs of a program become ready at its end, and a callback within it makes the device wait for the host. So
layers whose pages are wanted early have to be a program of their own (benchmarks/log/064-pages-layer-by-layer.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from models.decoder import Caches, Decoder, split_module
from models.engine.cached_pages import RowParts, gather_layers, rows_on_device
from models.engine.config import Bucket, RunnerConfig
from models.engine.group_sizes import GroupSizes
from models.engine.packed_step import PackedStep
from models.engine.plain_step import read_step, sample_rows

type OnLayer = Callable[[int, RowParts], None]
"""Takes the number of a layer that was started, and copies of its rows that the device makes after it."""


class LayeredStep:
    """Compiles and runs a model's steps in pieces. They compute what whole steps do, up to rounding.

    Every piece is a program of its own even where layers are alike: XLA keeps a program's operations as a graph that
    holds addresses, and rewrites it when the program is called with other weights.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, groups: Sequence[GroupSizes], num_pieces: int):
        self._config = config
        of_layers = {layer: (n, group.head_wise) for n, group in enumerate(groups) for layer in group.layers}
        self._groups = [of_layers[layer] for layer in sorted(of_layers)]
        self._rebuild, self._weights = split_module(model)
        self._num_layers = len(self._groups)
        self.pieces = pieces_of(self._num_layers, num_pieces)
        self._of_buckets: dict[Bucket, list[Any]] = {}

    @property
    def compiled(self) -> Collection[Bucket]:
        """Buckets whose programs are compiled."""
        return self._of_buckets.keys()

    def compile(
        self,
        bucket: Bucket,
        caches: Caches,
        last_tokens: Any,
        options: dict[str, str | bool] | None,
    ) -> None:
        """Compiles a bucket's programs if they are not, each beside the tracing of the next."""
        if bucket in self._of_buckets:
            return
        packed = jax.ShapeDtypeStruct((PackedStep.size(self._config, bucket),), jnp.int32)
        carried, shared = None, None
        with ThreadPoolExecutor() as threads:
            compiling = []
            for piece in self.pieces:
                jitted = jax.jit(functools.partial(self._run_piece, bucket, piece), donate_argnums=1)
                own = caches[piece.start : piece.stop]
                lowered = jitted.lower(self._weights, own, carried, shared, packed, last_tokens)
                made = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info)
                _, carried, begun, _ = made
                shared = begun if shared is None else shared
                compiling.append(threads.submit(lowered.compile, options))
            self._of_buckets[bucket] = [program.result() for program in compiling]

    def run(
        self,
        bucket: Bucket,
        caches: Caches,
        last_tokens: Int32[Array, "slots"],
        packed: Int32[Array, "n"],
        rows: Sequence[Int32[np.ndarray, "n"]],
        on_layer: OnLayer,
    ) -> tuple[Array, Array | None, Caches, Array]:
        """Starts all programs of a compiled bucket, and after each the copies of its layers' rows.

        Args:
          bucket: the step's.
          caches, last_tokens: as `run_step` takes them; caches are donated.
          packed: the packed step, on the device.
          rows: of each cache group, that are to be copied; empty for none of any.
          on_layer: called for each layer after its program was started, in order.

        Returns:
          As `run_step`.
        """
        of_groups = [rows_on_device(of_group) for of_group in rows] or [[] for _ in self._groups]
        written: list[Any] = []
        carried, shared = None, None
        results: Any = None
        for piece, program in zip(self.pieces, self._of_buckets[bucket], strict=True):
            own = caches[piece.start : piece.stop]
            own, carried, begun, results = program(self._weights, own, carried, shared, packed, last_tokens)
            shared = begun if shared is None else shared
            written += own
            if results is not None:  # of the last piece: its rows are not to delay the tokens
                results[0].copy_to_host_async()
            copies = gather_layers(own, [(of_groups[n], wise) for n, wise in self._groups[piece.start : piece.stop]])
            for layer, parts in zip(piece, copies, strict=True):
                on_layer(layer, parts)
        tokens, logits, last_tokens = results
        return tokens, logits, tuple(written), last_tokens

    def _run_piece(
        self,
        bucket: Bucket,
        piece: range,
        weights: Any,
        caches: Caches,
        carried: Any,
        shared: Any,
        packed: Array,
        last_tokens: Array,
    ) -> tuple[Caches, Any, Any, Any]:
        """Runs some layers.

        Args:
          caches: theirs.
          carried: of the pieces before this one: hidden states and the last choice of keys; None for the first.
          shared: what all layers take; None for the first.

        Returns:
          The caches, `carried` for the next piece, `shared` of the first piece, results of the last.
        """
        model = self._rebuild(weights)
        step, tokens, sampling, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        begun = None
        if shared is None:
            x, *begun = model.begin(tokens, caches[0], step.metadata(self._config.page_size, logit_rows))
            carried, shared = (x, None), begun
        x, choice = carried
        rope, groups = shared
        x, caches, choice = model.apply_layers(piece, x, rope, caches, groups, choice)
        if piece.stop < self._num_layers:
            return caches, (x, choice), begun, None
        return caches, None, None, sample_rows(bucket, step, model.finish(x, logit_rows), sampling, last_tokens)


def pieces_of(num_layers: int, num_pieces: int) -> list[range]:
    """Cuts layers into pieces whose lengths differ by one at most, at most as many as there are layers."""
    num_pieces = min(num_pieces, num_layers)
    ends = [num_layers * n // num_pieces for n in range(num_pieces + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]
