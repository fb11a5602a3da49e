"""Forward passes of steps that run as several compiled programs instead of one:

    begin: embedding, positions and other inputs that all layers share
    one program per range of consecutive layers, for example layers 0 to 7, then 8 to 15
    finish: logits of the last layer's output

The program that samples is the same as for other steps. There are two reasons to split a forward pass:

- Compile time. Ranges with the same kinds of layers share one compiled program. `runner` splits steps with many prompt
  tokens for this reason.
- Early copies. Cache pages of finished layers can be copied to the host while later layers compute (`copying_rows`). A
  single program would return all caches at its end, and a host callback inside the program would stall the device.

A page row is the unit of cache allocation: one page of one KV head if the heads of a layer have different windows,
otherwise one page of all heads.
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

from pallas_attn.models.decoder import Caches, Decoder, apply_layers, split_module
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.kv_transfer.cached_pages import RowCopies, gather_layers, rows_on_device
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import StepOutputs, make_outputs, read_step

type OnLayer = Callable[[int, RowCopies], None]
"""Function (layer, copies), called on the host when the copies of the layer's page rows have been launched. The device
makes the copies after it has run the program with this layer, so they may not be ready yet."""

type LayerKind = tuple[Any, Any, int]
"""Graph definition of a layer for `nnx.merge`, tree structure of its weights, and index of its cache group (layers with
equal attention windows). Layers with equal kinds differ only in their weights."""

type OnProgram = Callable[[range, Caches], None]
"""Function (layer_range, caches), called on the host after the program of the layers in `layer_range` has been
launched. `caches` are outputs of the program: the updated caches of the layers."""


class LayeredStep:
    """Splits the forward passes of a model into programs. Their logits equal the logits of a single program up to
    rounding.

    Attributes:
      layers: the model's layers.
      num_programs: maximum number of layer ranges.
      layer_ranges: consecutive layers of each program between begin and finish.
      compiled: the compiled forward passes by bucket (padded batch shape).
    """

    def __init__(self, model: Decoder, config: RunnerConfig, num_programs: int):
        """Choose the layer ranges; nothing is compiled.

        Raises:
          NotImplementedError: layers of the model use the caches of other layers, or have per-layer embeddings.
        """
        if not model.config.is_divisible:
            raise NotImplementedError(
                f"model: the steps of this {model.config.model_type} are not supported as several programs, because"
                " layers use the caches of other layers or per-layer embeddings"
            )
        self._config = config
        self._rebuild, weights = split_module(model)
        places = self._rebuild([*range(len(weights))])
        self.layers = [Layer.of(layer, places.layer_groups[n]) for n, layer in enumerate(places.layers)]
        self.num_programs = num_programs
        self.layer_ranges = split_layers(len(self.layers), num_programs, _period([layer.kind for layer in self.layers]))
        self.compiled: dict[Bucket, StepPrograms] = {}

    def compile(
        self,
        bucket: Bucket,
        weights: Sequence[Array],
        caches: Caches,
        last_tokens: Any,
        start: Callable[[jax.stages.Lowered], Future[Any]],
    ) -> Callable[[], StepPrograms]:
        """Lower the programs of a bucket and start their compilation.

        Args:
          bucket: padded shape of the step.
          weights, caches, last_tokens: as in `forward`.
          start: function that starts the compilation of a lowered program in another thread.

        Returns:
          A function that waits until all programs are compiled, stores the step in `compiled`, and returns the step.
        """
        packed = jax.ShapeDtypeStruct((PackedStep.size(self._config, bucket),), jnp.int32)

        def program(function: Callable[..., Any], donated: tuple[int, ...], *arguments: Any) -> tuple[Future[Any], Any]:
            """Start to compile the function for these arguments. Return the future and the shapes of the results."""
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            return start(lowered), jax.tree.map(
                lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info
            )

        begin, (x, *shared) = program(
            functools.partial(self.begin, bucket), (), weights, caches[0], packed, last_tokens
        )
        known: dict[Any, tuple[Future[Any], Any]] = {}
        futures, choice = [], None
        for layer_range in self.layer_ranges:
            layers = self.layers[layer_range.start : layer_range.stop]
            kinds, own = tuple(layer.kind for layer in layers), [layer.weights(weights) for layer in layers]
            arguments = own, caches[layer_range.start : layer_range.stop], x, choice, *shared
            leaves, structure = jax.tree.flatten(arguments)
            key = kinds, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if key not in known:
                known[key] = program(functools.partial(apply_layer_range, kinds), (1, 2), *arguments)
            of_layers, (_, x, choice) = known[key]
            futures.append(of_layers)
        finish, _ = program(functools.partial(self._finish, bucket), (), weights, x, last_tokens, packed)

        def finished() -> StepPrograms:
            programs = [future.result() for future in futures]
            step = StepPrograms(self.layer_ranges, self.layers, begin.result(), programs, finish.result())
            return self.compiled.setdefault(bucket, step)

        return finished

    def begin(
        self, bucket: Bucket, weights: Sequence[Array], cache: Any, packed: Array, last_tokens: Array
    ) -> tuple[Array, Any, Any]:
        """Compute the inputs that all layers share.

        Args:
          bucket: padded shape of the step.
          weights, packed, last_tokens: as in `forward`.
          cache: cache of the first layer. Only its shapes and dtypes are used.

        Returns:
          Hidden states x [T, D] before the first layer, RoPE inputs, and attention metadata for each cache group.
        """
        step, tokens, _, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        return self._rebuild(weights).begin(tokens, cache, step.metadata(self._config.page_size, logit_rows))

    def _finish(
        self, bucket: Bucket, weights: Sequence[Array], x: Array, last_tokens: Array, packed: Array
    ) -> StepOutputs:
        """Compute the outputs of the step from the last layer's output x [T, D]."""
        step, _, sampling, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        model = self._rebuild(weights)
        logits, hidden = model.finish(x, logit_rows), model.norm(x[bucket.decode_rows :])
        return make_outputs(bucket, step.row_parameters().pack(), logits, sampling, hidden)


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """A compiled forward pass of several programs, which is called like a forward pass of one program.

    Attributes:
      layer_ranges: the layers of each program in `programs_of_layers`.
      layers: the model's layers.
      begin: compiled `LayeredStep.begin`.
      programs_of_layers: compiled `apply_layer_range`, one per layer range.
      finish: compiled `LayeredStep._finish`.
    """

    layer_ranges: Sequence[range]
    layers: Sequence[Layer]
    begin: Callable[..., Any]
    programs_of_layers: Sequence[Callable[..., Any]]
    finish: Callable[..., Any]

    def __call__(
        self,
        weights: Sequence[Array],
        caches: Caches,
        last_tokens: Int32[Array, "slots"],
        packed: Int32[Array, "n"],
        drafts: None = None,
        *,
        on_program: OnProgram | None = None,
    ) -> tuple[StepOutputs, Caches]:
        """Launch all programs without waiting for them. Caches are donated.

        Args:
          weights, caches, last_tokens, packed, drafts: as in `forward`, all on the device.
          on_program: called after each program of a layer range except the last has been launched. For the last range
            the caller calls it, after it has launched the program that samples. Otherwise copies of page rows would
            delay the sampled tokens.

        Returns:
          As `forward`.
        """
        x, *shared = self.begin(weights, caches[0], packed, last_tokens)
        written: list[Any] = []
        choice: Any = None
        for layer_range, program in zip(self.layer_ranges, self.programs_of_layers, strict=True):
            of_layers = [layer.weights(weights) for layer in self.layers[layer_range.start : layer_range.stop]]
            own, x, choice = program(of_layers, caches[layer_range.start : layer_range.stop], x, choice, *shared)
            written += own
            if on_program is not None and layer_range.stop < len(self.layers):
                on_program(layer_range, own)
        return self.finish(weights, x, last_tokens, packed), tuple(written)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model, without its weights.

    Attributes:
      kind: see `LayerKind`.
      places: indices of the layer's weights in the flat list of the model's weights.
    """

    kind: LayerKind
    places: Sequence[int]

    @staticmethod
    def of(layer: nnx.Module, group: int) -> Layer:
        """Make the description of a layer.

        Args:
          layer: the layer's module, in which each weight is replaced by its index in the list of the model's weights.
          group: index of the layer's cache group.
        """
        graph, state = nnx.split(layer)
        places, structure = jax.tree.flatten(state)
        return Layer((graph, structure, group), places)

    def weights(self, weights: Sequence[Array]) -> list[Array]:
        """Select the layer's weights from the model's weights. The result is a flat list: with a tree as argument, each
        call of a compiled program would take the host more time."""
        return [weights[place] for place in self.places]


def apply_layer_range(
    kinds: Sequence[LayerKind],
    weights: Sequence[Sequence[Array]],
    caches: Caches,
    x: Float[Array, "T D"],
    choice: Any,
    rope: Any,
    groups: Sequence[Any],
) -> tuple[Caches, Float[Array, "T D"], Any]:
    """Apply consecutive layers.

    Args:
      kinds: kind of each layer.
      weights: flat list of weights of each layer.
      caches: cache of each layer.
      x: [T, D], hidden states before these layers.
      choice: cache slots of the keys that the last indexer before these layers selected (DeepSeek sparse attention);
        None if no layer before has an indexer.
      rope: RoPE inputs of the step's tokens.
      groups: attention metadata of each cache group.

    Returns:
      The layers' caches with the new tokens; and x and choice, the arguments for the next layer.
    """
    layers = [
        nnx.merge(graph, jax.tree.unflatten(structure, of_layer))
        for (graph, structure, _), of_layer in zip(kinds, weights, strict=True)
    ]
    x, caches, choice = apply_layers(layers, x, rope, caches, [groups[group] for *_, group in kinds], choice)
    return caches, x, choice


def copying_rows(rows: Sequence[Int32[np.ndarray, "n"]], groups: Sequence[GroupSizes], on_layer: OnLayer) -> OnProgram:
    """Make a function that launches copies of page rows after each program and passes the copies to `on_layer`.

    Args:
      rows: for each cache group, int32 indices of the page rows to copy.
      groups: the cache groups.
      on_layer: function that is called with the copies of each layer.
    """
    of_layers = {
        layer: (on_device, group.head_wise)
        for on_device, group in zip(map(rows_on_device, rows), groups, strict=True)
        for layer in group.layers
    }

    def on_program(layer_range: range, caches: Caches) -> None:
        copies = gather_layers(caches, [of_layers[layer] for layer in layer_range])
        for layer, of_layer in zip(layer_range, copies, strict=True):
            on_layer(layer, of_layer)

    return on_program


def split_layers(num_layers: int, num_programs: int, period: int = 1) -> list[range]:
    """Split layers into at most `num_programs` consecutive ranges.

    With several ranges, all but the first have the same length, a multiple of `period`, so that they have the same
    kinds of layers and share a program. The first range has the remaining layers, because the first layers of a model
    may be of other kinds.

    Args:
      num_layers: number of layers.
      num_programs: maximum number of ranges.
      period: number of layers after which the kinds of layers repeat.
    """
    length = -(-num_layers // num_programs)
    length = min(-(-length // period) * period, num_layers)
    starts = [0, *range(num_layers % length or length, num_layers, length)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]


def _period(kinds: Sequence[Any]) -> int:
    """Return the number of layers after which the layer kinds repeat in the second half of the model; 1 if they do not
    repeat. The first half is ignored, because the first layers may be of other kinds."""
    last = kinds[len(kinds) // 2 :]
    return next((n for n in range(1, len(last) // 2 + 1) if last[n:] == last[:-n]), 1)
