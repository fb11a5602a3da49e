"""A step as several programs in a row: what all layers take, some layers at a time, and samples of the last one.

Layers that are alike are compiled once, however many of these programs they make up, and pages of some layers can be
copied while the layers after them compute: all outputs of a program become ready at its end, and a callback within it
makes the device wait for the host (benchmarks/log/064-pages-layer-by-layer.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.decoder import Caches, Decoder, apply_layers, split_module
from models.engine.config import Bucket, RunnerConfig
from models.engine.group_sizes import GroupSizes
from models.engine.kv_transfer.cached_pages import RowParts, gather_layers, rows_on_device
from models.engine.step.packed import PackedStep
from models.engine.step.plain import read_step, sample_rows

type OnLayer = Callable[[int, RowParts], None]
"""Takes the number of a layer that was started, and copies of its rows that the device makes after it."""

type LayerKind = tuple[Any, Any, int]
"""Graph that `nnx.merge` makes a layer of, together with its weights; structure of these; and its cache group."""

type OnPiece = Callable[[range, Caches], None]
"""Takes layers that were started, and the caches that they leave."""


class LayeredStep:
    """Cuts a model's steps into programs, which compute what whole steps do, up to rounding.

    Attributes:
      layers: of the model.
      num_pieces: number of pieces that was asked for.
      pieces: layers of each program that has some.
      compiled: steps that are compiled.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, num_pieces: int):
        self._config = config
        self._rebuild, weights = split_module(model)
        places = self._rebuild([*range(len(weights))])
        self.layers = [Layer.of(layer, places.layer_groups[n]) for n, layer in enumerate(places.layers)]
        self.num_pieces = num_pieces
        self.pieces = pieces_of(len(self.layers), num_pieces, _period([layer.kind for layer in self.layers]))
        self.compiled: dict[Bucket, StepInPieces] = {}

    def compile(
        self,
        bucket: Bucket,
        weights: Sequence[Array],
        caches: Caches,
        last_tokens: Any,
        start: Callable[[jax.stages.Lowered], Future[Any]],
    ) -> Callable[[], StepInPieces]:
        """Lowers a bucket's programs.

        Args:
          bucket: the step's.
          weights, caches, last_tokens: as `run_step` takes them.
          start: starts to compile a program as soon as it is lowered.

        Returns:
          A function that waits for all programs, and keeps them.
        """
        packed = jax.ShapeDtypeStruct((PackedStep.size(self._config, bucket),), jnp.int32)

        def program(function: Callable[..., Any], donated: tuple[int, ...], *arguments: Any) -> tuple[Future[Any], Any]:
            """Starts to compile the function for these arguments; returns that, and shapes of the results."""
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            return start(lowered), jax.tree.map(
                lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info
            )

        begin, (x, *shared) = program(
            functools.partial(self.begin, bucket), (), weights, caches[0], packed, last_tokens
        )
        known: dict[Any, tuple[Future[Any], Any]] = {}
        of_pieces, choice = [], None
        for piece in self.pieces:
            layers = self.layers[piece.start : piece.stop]
            kinds, own = tuple(layer.kind for layer in layers), [layer.weights(weights) for layer in layers]
            arguments = own, caches[piece.start : piece.stop], x, choice, *shared
            leaves, structure = jax.tree.flatten(arguments)
            key = kinds, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if key not in known:
                known[key] = program(functools.partial(apply_piece, kinds), (1, 2), *arguments)
            of_piece, (_, x, choice) = known[key]
            of_pieces.append(of_piece)
        finish, _ = program(functools.partial(self._finish, bucket), (2,), weights, x, last_tokens, packed)

        def finished() -> StepInPieces:
            programs = [of.result() for of in of_pieces]
            step = StepInPieces(self.pieces, self.layers, begin.result(), programs, finish.result())
            return self.compiled.setdefault(bucket, step)

        return finished

    def begin(
        self, bucket: Bucket, weights: Sequence[Array], cache: Any, packed: Array, last_tokens: Array
    ) -> tuple[Array, Any, Any]:
        """Computes what layers take; of the first one there is also its cache, of which nothing but shapes is used."""
        step, tokens, _, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        return self._rebuild(weights).begin(tokens, cache, step.metadata(self._config.page_size, logit_rows))

    def _finish(
        self, bucket: Bucket, weights: Sequence[Array], x: Array, last_tokens: Array, packed: Array
    ) -> tuple[Array, Array | None, Array]:
        """Samples from what the last layer returned; results as those of `sample_rows`."""
        step, _, sampling, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        logits = self._rebuild(weights).finish(x, logit_rows)
        return sample_rows(bucket, step, logits, sampling, last_tokens)


@dataclasses.dataclass(frozen=True)
class StepInPieces:
    """A compiled step of several programs, which is called as one of a single program is."""

    pieces: Sequence[range]
    layers: Sequence[Layer]
    begin: Callable[..., Any]
    of_pieces: Sequence[Callable[..., Any]]
    finish: Callable[..., Any]

    def __call__(
        self,
        weights: Sequence[Array],
        caches: Caches,
        last_tokens: Int32[Array, "slots"],
        packed: Int32[Array, "n"],
        on_piece: OnPiece | None = None,
    ) -> tuple[Array, Array | None, Caches, Array]:
        """Starts all programs; caches and last tokens are donated.

        Args:
          weights, caches, last_tokens, packed: as `run_step` takes them, all on the device.
          on_piece: called after each piece was started, for the last one after all programs were.

        Returns:
          As `run_step`.
        """
        x, *shared = self.begin(weights, caches[0], packed, last_tokens)
        written: list[Any] = []
        choice: Any = None
        results: Any = None
        for piece, program in zip(self.pieces, self.of_pieces, strict=True):
            of_layers = [layer.weights(weights) for layer in self.layers[piece.start : piece.stop]]
            own, x, choice = program(of_layers, caches[piece.start : piece.stop], x, choice, *shared)
            written += own
            if piece.stop == len(self.layers):
                results = self.finish(weights, x, last_tokens, packed)
                results[0].copy_to_host_async()  # before copies of rows, which are not to delay it
            if on_piece is not None:
                on_piece(piece, own)
        tokens, logits, last_tokens = results
        return tokens, logits, tuple(written), last_tokens


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model, without its weights.

    Attributes:
      kind: equal for layers that are alike.
      places: of its weights, in the flat list of all weights of the model.
    """

    kind: LayerKind
    places: Sequence[int]

    @staticmethod
    def of(layer: nnx.Module, group: int) -> Layer:
        """Takes apart a layer of a cache group that has places of weights in place of these."""
        graph, state = nnx.split(layer)
        places, structure = jax.tree.flatten(state)
        return Layer((graph, structure, group), places)

    def weights(self, weights: Sequence[Array]) -> list[Array]:
        """Its weights of all, as a flat list, since a tree takes the host longer at each call."""
        return [weights[place] for place in self.places]


def apply_piece(
    kinds: Sequence[LayerKind],
    weights: Sequence[Sequence[Array]],
    caches: Caches,
    x: Float[Array, "T D"],
    choice: Any,
    rope: Any,
    groups: Sequence[Any],
) -> tuple[Caches, Float[Array, "T D"], Any]:
    """Applies layers of these kinds.

    Returns:
      The caches they leave, and x and choice for the layers after them.
    """
    layers = [
        nnx.merge(graph, jax.tree.unflatten(structure, of_layer))
        for (graph, structure, _), of_layer in zip(kinds, weights, strict=True)
    ]
    x, caches, choice = apply_layers(layers, x, rope, caches, [groups[group] for *_, group in kinds], choice)
    return caches, x, choice


def copying_rows(rows: Sequence[Int32[np.ndarray, "n"]], groups: Sequence[GroupSizes], on_layer: OnLayer) -> OnPiece:
    """Makes a function that starts copies of rows of each cache group as soon as layers are started, and hands them on
    layer by layer."""
    of_layers = {
        layer: (on_device, group.head_wise)
        for on_device, group in zip(map(rows_on_device, rows), groups, strict=True)
        for layer in group.layers
    }

    def on_piece(piece: range, caches: Caches) -> None:
        copies = gather_layers(caches, [of_layers[layer] for layer in piece])
        for layer, parts in zip(piece, copies, strict=True):
            on_layer(layer, parts)

    return on_piece


def pieces_of(num_layers: int, num_pieces: int, period: int = 1) -> list[range]:
    """Cuts layers into at most so many pieces: all are of the same number of layers, which is a multiple of `period`
    if there are several, but for the first, which has what is left, since the first layers may be unlike the others."""
    length = -(-num_layers // num_pieces)
    length = min(-(-length // period) * period, num_layers)
    starts = [0, *range(num_layers % length or length, num_layers, length)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]


def _period(kinds: Sequence[Any]) -> int:
    """After how many layers their kinds come again at the end of a model, where first layers may be of others: the
    least number that holds for the last half of them, or 1."""
    last = kinds[len(kinds) // 2 :]
    return next((n for n in range(1, len(last) // 2 + 1) if last[n:] == last[:-n]), 1)
