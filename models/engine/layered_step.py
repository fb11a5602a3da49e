"""A step as one program before the layers, one a layer and one after them, so that pages of a layer can be copied while
the layers after it compute.

All outputs of a program become ready at its end, and a callback within it makes the device wait for the host. So a
layer whose pages are wanted early has to be a program of its own (benchmarks/log/064-pages-layer-by-layer.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models.decoder import Caches, Decoder, split_layers, split_module
from models.engine.cached_pages import RowParts, gather_rows
from models.engine.config import Bucket, RunnerConfig
from models.engine.group_sizes import GroupSizes
from models.engine.packed_step import PackedStep
from models.engine.plain_step import read_step, sample_rows

type OnLayer = Callable[[int, RowParts], None]
"""Takes the number of a layer that was started, and copies of its rows that the device makes after it."""


class LayeredStep:
    """Compiles and runs a model's steps layer by layer. They compute what whole steps do, up to rounding."""

    def __init__(self, model: Decoder, config: RunnerConfig, groups: Sequence[GroupSizes]):
        self._config = config
        of_layers = {layer: (n, group.head_wise) for n, group in enumerate(groups) for layer in group.layers}
        self._groups = [of_layers[layer] for layer in sorted(of_layers)]
        self._rebuild, self._weights = split_module(model)
        self._apply, layers = split_layers(model)
        self._layers = [(graph, *jax.tree.flatten(state)) for graph, state in layers]
        self._shares_choice = [layer.shares_choice for layer in model.layers]
        self._of_buckets: dict[Bucket, tuple[Any, list[Any], Any]] = {}
        self._of_layers: dict[Any, Any] = {}

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
        """Compiles a bucket's programs if they are not; layers that are alike share one."""
        if bucket in self._of_buckets:
            return
        packed = jax.ShapeDtypeStruct((PackedStep.size(self._config, bucket),), jnp.int32)
        begin = jax.jit(functools.partial(self._begin, bucket))
        x, rope, groups = jax.eval_shape(begin, self._weights, caches, packed, last_tokens)
        finish = jax.jit(functools.partial(self._finish, bucket))
        programs, choice = [], None
        for layer, cache in enumerate(caches):
            given = choice if self._shares_choice[layer] else None
            program, choice = self._compile_layer(layer, x, rope, cache, groups, given, options)
            programs.append(program)
        self._of_buckets[bucket] = (
            begin.lower(self._weights, caches, packed, last_tokens).compile(options),
            programs,
            finish.lower(self._weights, x, packed, last_tokens).compile(options),
        )

    def run(
        self,
        bucket: Bucket,
        caches: Caches,
        last_tokens: Int32[Array, "slots"],
        packed: Int32[Array, "n"],
        rows: Sequence[Int32[np.ndarray, "n"]],
        on_layer: OnLayer,
    ) -> tuple[Array, Array | None, Caches, Array]:
        """Starts all programs of a compiled bucket, and after each layer's the copies of its rows.

        Args:
          bucket: the step's.
          caches, last_tokens: as `run_step` takes them; caches are donated.
          packed: the packed step, on the device.
          rows: of each cache group, that are to be copied.
          on_layer: called after each layer was started, in order.

        Returns:
          As `run_step`.
        """
        begin, programs, finish = self._of_buckets[bucket]
        x, rope, groups = begin(self._weights, caches, packed, last_tokens)
        written, choice = list(caches), None
        for layer, program in enumerate(programs):
            (group, head_wise), weights = self._groups[layer], self._layers[layer][1]
            given = choice if self._shares_choice[layer] else None
            x, written[layer], choice = program(weights, x, rope, written[layer], *groups[group], given)
            on_layer(layer, gather_rows(written[layer], head_wise, rows[group]))
        tokens, logits, last_tokens = finish(self._weights, x, packed, last_tokens)
        return tokens, logits, tuple(written), last_tokens

    def _compile_layer(
        self,
        layer: int,
        x: Any,
        rope: Any,
        cache: Any,
        groups: Any,
        choice: Any,
        options: dict[str, str | bool] | None,
    ) -> tuple[Any, Any]:
        """Compiles a layer's program; returns it, and shapes of the choice of keys that it hands to the next layer."""
        graph, weights, structure = self._layers[layer]
        arguments = (weights, x, rope, cache, *groups[self._groups[layer][0]], choice)
        leaves, form = jax.tree.flatten(arguments)
        key = graph, structure, form, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._of_layers:

            def apply(weights: Any, *rest: Any) -> Any:
                return self._apply(graph, jax.tree.unflatten(structure, weights), *rest)

            lowered = jax.jit(apply, donate_argnums=(1, 3)).lower(*arguments)
            shapes = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info[2])
            self._of_layers[key] = lowered.compile(options), shapes
        return self._of_layers[key]

    def _begin(self, bucket: Bucket, weights: Any, caches: Caches, packed: Array, last_tokens: Array) -> Any:
        step, tokens, _, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        return self._rebuild(weights).begin(tokens, caches, step.metadata(self._config.page_size, logit_rows))

    def _finish(
        self, bucket: Bucket, weights: Any, x: Float[Array, "T D"], packed: Array, last_tokens: Array
    ) -> tuple[Array, Array | None, Array]:
        step, _, sampling, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        return sample_rows(bucket, step, self._rebuild(weights).finish(x, logit_rows), sampling, last_tokens)
