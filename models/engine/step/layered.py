"""Forward passes of steps that run as several compiled programs instead of one:

    begin: embedding, positions and other inputs that all layers share
    one program per range of consecutive layers, for example layers 0 to 7, then 8 to 15
    finish: logits of the last layer's output

Layers without a cache, which read the caches of earlier layers, are in ranges of their own. Before these ranges, the
program `narrow` may select the tokens with logits.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_attn.models.decoder import Caches, Decoder, apply_layers, over_mesh, specs_of, split_module
from pallas_attn.models.decoder.gemma import GemmaInputs
from pallas_attn.models.decoder.mesh import AXES, DATA
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.kv_transfer.row_copies import GroupRows, RowCopies, gather_layers
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
      num_programs: maximum number of layer ranges; with layers without a cache, there are at least two.
      layer_ranges: consecutive layers of each program between begin and finish.
      compiled: the compiled forward passes by bucket (padded batch shape).
    """

    def __init__(self, model: Decoder, config: RunnerConfig, num_programs: int):
        """Choose the layer ranges; nothing is compiled."""
        self._config, self._mesh = config, model.mesh
        self._rebuild, weights = split_module(model)
        places = self._rebuild([*range(len(weights))])
        self.layers = [Layer.of(layer, places.layer_groups[n]) for n, layer in enumerate(places.layers)]
        self.num_programs = num_programs
        kinds, num_cached = [layer.kind for layer in self.layers], len(model.config.cached_layers)
        of_cached = max(num_programs * num_cached // len(kinds), 1)
        self.layer_ranges = split_layers(num_cached, of_cached, _period(kinds[:num_cached]))
        if num_cached < len(kinds):
            rest = kinds[num_cached:]
            ranges = split_layers(len(rest), max(num_programs - of_cached, 1), _period(rest))
            self.layer_ranges += [range(num_cached + r.start, num_cached + r.stop) for r in ranges]
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
        size, num_ranks, placement = PackedStep.size(self._config, bucket), 1, None
        if self._mesh is not None:
            num_ranks, placement = self._mesh.shape[DATA], NamedSharding(self._mesh, _OF_RANKS)
        packed = jax.ShapeDtypeStruct((num_ranks * size,), jnp.int32, sharding=placement)
        of_weights = specs_of(list(weights))
        program = functools.partial(_start_to_compile, start, self._mesh)
        of_begin = (of_weights, specs_of(caches[0]), _OF_RANKS, _OF_RANKS), (_OF_DEVICES, _OF_DEVICES, _OF_DEVICES)
        begin, (x, *inputs) = program(
            functools.partial(self.begin, bucket), (), of_begin, weights, caches[0], packed, last_tokens
        )
        known: dict[Any, tuple[Future[Any], Any]] = {}
        futures, choice, narrow = [], None, None
        for number, layer_range in enumerate(self.layer_ranges):
            layers = self.layers[layer_range.start : layer_range.stop]
            if layers[0].cache_source is not None and inputs[1] is not None and narrow is None:
                of_narrow = (_OF_DEVICES, _OF_RANKS, _OF_RANKS), _OF_DEVICES
                narrow, x = program(functools.partial(self._narrow, bucket), (), of_narrow, x, packed, last_tokens)
            kinds, own = tuple(layer.kind for layer in layers), [layer.weights(weights) for layer in layers]
            shared = inputs_of_range(inputs, number, is_narrow=narrow is not None)
            sources = caches_to_read(layers, caches)
            of_range = caches[layer_range.start : layer_range.stop]
            arguments = own, of_range, x, choice, *shared, sources
            of_caches = specs_of(of_range)
            of_arguments = specs_of(own), of_caches, *[_OF_DEVICES] * 4, specs_of(sources)
            leaves, structure = jax.tree.flatten(arguments)
            partitions = tuple(jax.tree.leaves(of_arguments))
            key = kinds, structure, partitions, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if key not in known:
                specs = of_arguments, (of_caches, _OF_DEVICES, _OF_DEVICES)
                known[key] = program(functools.partial(apply_layer_range, kinds), (1, 2), specs, *arguments)
            of_layers, (_, x, choice) = known[key]
            futures.append(of_layers)
        of_outputs = StepOutputs(*[_OF_RANKS] * len(StepOutputs._fields))
        of_finish = (of_weights, _OF_DEVICES, _OF_RANKS, _OF_RANKS), of_outputs
        finish, _ = program(functools.partial(self._finish, bucket), (), of_finish, weights, x, last_tokens, packed)

        def finished() -> StepPrograms:
            programs, narrowing = [future.result() for future in futures], None if narrow is None else narrow.result()
            step = StepPrograms(self.layer_ranges, self.layers, begin.result(), programs, finish.result(), narrowing)
            return self.compiled.setdefault(bucket, step)

        return finished

    def begin(
        self, bucket: Bucket, weights: Sequence[Array], cache: Any, packed: Array, last_tokens: Array
    ) -> tuple[Array, RangeInputs, RangeInputs | None]:
        """Compute the inputs that all layers share.

        Args:
          bucket: padded shape of the step.
          weights, packed, last_tokens: as in `forward`.
          cache: cache of the first layer. Only its shapes and dtypes are used.

        Returns:
          Hidden states x [T, D] before the first layer; the inputs of all tokens; and the inputs of the tokens with
          logits, None unless layers are applied only to these tokens.
        """
        step, tokens, _, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        model, metadata = self._rebuild(weights), step.metadata(self._config.page_size, logit_rows)
        x, inputs, groups = model.begin(tokens, cache, metadata)
        of_rows = None
        if bucket.skips_layers:
            of_rows = self._of_ranges(*model.inputs_of_rows(inputs, metadata, cache, logit_rows))
        return x, self._of_ranges(inputs, groups), of_rows

    def _of_ranges(self, inputs: Any, groups: Sequence[Any]) -> RangeInputs:
        """Split per-layer embeddings into the embeddings of each layer range, which are arguments of its program."""
        if not isinstance(inputs, GemmaInputs) or inputs.ple is None:
            return RangeInputs(inputs, groups, None)
        of_ranges = [inputs.of_layers(slice(r.start, r.stop)).ple for r in self.layer_ranges]
        return RangeInputs(dataclasses.replace(inputs, ple=None), groups, of_ranges)

    def _narrow(self, bucket: Bucket, x: Array, packed: Array, last_tokens: Array) -> Array:
        """Return the hidden states of the tokens with logits."""
        *_, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        return x[logit_rows]

    def _finish(
        self, bucket: Bucket, weights: Sequence[Array], x: Array, last_tokens: Array, packed: Array
    ) -> StepOutputs:
        """Compute the outputs of the step from the last layer's output x, [T, D] or that of the tokens with logits."""
        step, _, sampling, logit_rows = read_step(self._config, bucket, packed, last_tokens)
        model, rows = self._rebuild(weights), step.row_parameters().pack()
        if bucket.skips_layers:
            return make_outputs(bucket, rows, model.logits(model.norm(x)), sampling, None)
        logits, hidden = model.finish(x, logit_rows), model.hidden_states(x[bucket.decode_rows :])
        return make_outputs(bucket, rows, logits, sampling, hidden)


_OF_RANKS = PartitionSpec(DATA)
"""Partition of arrays with a part for each data rank."""

_OF_DEVICES = PartitionSpec(AXES)
"""Partition of values, except caches, that a program of a step passes to the next one. Devices may have different
values. On a mesh, the first axis of such an array therefore has one entry for each device."""


def _start_to_compile(
    start: Callable[[jax.stages.Lowered], Future[Any]],
    mesh: Mesh | None,
    function: Callable[..., Any],
    donated: tuple[int, ...],
    specs: tuple[Any, Any],
    *arguments: Any,
) -> tuple[Future[Any], Any]:
    """Lower a program and start its compilation.

    Args:
      start: function that starts the compilation of a lowered program in another thread.
      mesh: the mesh; None on one device.
      function: the program of one device.
      donated: indices of donated arguments.
      specs: partitions of arguments and results on a mesh.
      arguments: the arguments, or their shapes.

    Returns:
      The future of the compiled program, and the shapes of the results. On a mesh, all shapes have the placement
      `_OF_DEVICES`, which is wrong for caches and step outputs; later programs use only the shapes of other results.
    """
    sharding = None
    if mesh is not None:
        function, sharding = _on_devices(function, mesh, *specs), NamedSharding(mesh, _OF_DEVICES)
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    return start(lowered), jax.tree.map(
        lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding), lowered.out_info
    )


def _on_devices(function: Callable[..., Any], mesh: Mesh, of_arguments: Any, of_results: Any) -> Callable[..., Any]:
    """Return a function that runs a program on every device of a mesh.

    Args:
      function: the program of one device.
      mesh: the mesh.
      of_arguments, of_results: partitions of arguments and results. Where a partition is the object `_OF_DEVICES`, the
        first axis is the number of the device, which `function` neither gets nor returns.
    """

    def changed(change: Callable[[Array], Array], specs: Any, values: Any) -> Any:
        return jax.tree.map(
            lambda spec, value: jax.tree.map(change, value) if spec is _OF_DEVICES else value, specs, values
        )

    def on_device(*arguments: Any) -> Any:
        results = function(*changed(lambda x: x[0], of_arguments, arguments))
        return changed(lambda x: x[None], of_results, results)

    return over_mesh(on_device, mesh, of_arguments, of_results)


class RangeInputs(NamedTuple):
    """Inputs of the programs of layer ranges that depend only on the tokens of a step.

    Attributes:
      inputs: `SharedInputs` of the tokens, without per-layer embeddings.
      groups: attention metadata of each cache group.
      ple: per-layer embeddings of each layer range; None for a model without them.
    """

    inputs: Any
    groups: Any
    ple: Any


def inputs_of_range(inputs: Sequence[Any], number: int, *, is_narrow: bool) -> tuple[Any, Any]:
    """Return the inputs and the attention metadata of a layer range.

    Args:
      inputs: results of `LayeredStep.begin` after x.
      number: index of the range.
      is_narrow: whether its layers are applied only to the tokens with logits.
    """
    shared, groups, ple = inputs[is_narrow]
    return shared if ple is None else dataclasses.replace(shared, ple=ple[number]), groups


def caches_to_read(layers: Sequence[Layer], caches: Sequence[Any]) -> dict[int, Any]:
    """Return, by index, the caches of earlier layers that some layers read."""
    sources = {layer.cache_source for layer in layers if layer.cache_source is not None}
    return {source: caches[source] for source in sorted(sources)}


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """A compiled forward pass of several programs, which is called like a forward pass of one program.

    Attributes:
      layer_ranges: the layers of each program in `programs_of_layers`.
      layers: the model's layers.
      begin: compiled `LayeredStep.begin`.
      programs_of_layers: compiled `apply_layer_range`, one per layer range.
      finish: compiled `LayeredStep._finish`.
      narrow: compiled `LayeredStep._narrow`; None if all layers are applied to all tokens.
    """

    layer_ranges: Sequence[range]
    layers: Sequence[Layer]
    begin: Callable[..., Any]
    programs_of_layers: Sequence[Callable[..., Any]]
    finish: Callable[..., Any]
    narrow: Callable[..., Any] | None = None

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
        x, *inputs = self.begin(weights, caches[0], packed, last_tokens)
        written: list[Any] = []
        choice: Any = None
        is_narrow = False
        for number, (layer_range, program) in enumerate(zip(self.layer_ranges, self.programs_of_layers, strict=True)):
            layers = self.layers[layer_range.start : layer_range.stop]
            if layers[0].cache_source is not None and self.narrow is not None and not is_narrow:
                x, is_narrow = self.narrow(x, packed, last_tokens), True
            of_layers = [layer.weights(weights) for layer in layers]
            shared = *inputs_of_range(inputs, number, is_narrow=is_narrow), caches_to_read(layers, written)
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
      cache_source: index of the layer whose cache this layer reads; None if it has its own cache.
    """

    kind: LayerKind
    places: Sequence[int]
    cache_source: int | None

    @staticmethod
    def of(layer: Any, group: int) -> Layer:
        """Make the description of a layer.

        Args:
          layer: the layer's module, in which each weight is replaced by its index in the list of the model's weights.
          group: index of the layer's cache group.
        """
        graph, state = nnx.split(layer)
        places, structure = jax.tree.flatten(state)
        return Layer((graph, structure, group), places, layer.cache_source)

    def weights(self, weights: Sequence[Array]) -> list[Array]:
        """Select the layer's weights from the model's weights. The result is a flat list: with a tree as argument, each
        call of a compiled program would take the host more time."""
        return [weights[place] for place in self.places]


def apply_layer_range(
    kinds: Sequence[LayerKind],
    weights: Sequence[Sequence[Array]],
    caches: Caches,
    x: Float[Array, "T *streams D"],
    choice: Any,
    inputs: Any,
    groups: Sequence[Any],
    sources: Mapping[int, Any],
) -> tuple[Caches, Float[Array, "T *streams D"], Any]:
    """Apply consecutive layers.

    Args:
      kinds: kind of each layer.
      weights: flat list of weights of each layer.
      caches: cache of each layer.
      x: [T, D], hidden states before these layers.
      choice: cache slots of the keys that the last indexer before these layers selected (DeepSeek sparse attention);
        None if no layer before has an indexer.
      inputs: `SharedInputs` of the step's tokens, with the per-layer embeddings of these layers.
      groups: attention metadata of each cache group.
      sources: caches of earlier layers that these layers read, by layer.

    Returns:
      The layers' caches with the new tokens; and x and choice, the arguments for the next layer.
    """
    layers = [
        nnx.merge(graph, jax.tree.unflatten(structure, of_layer))
        for (graph, structure, _), of_layer in zip(kinds, weights, strict=True)
    ]
    steps = [groups[group] for *_, group in kinds]
    x, caches, choice = apply_layers(layers, x, inputs, caches, steps, choice, earlier=sources)
    return caches, x, choice


def copying_rows(of_layers: Mapping[int, GroupRows], on_layer: OnLayer) -> OnProgram:
    """Make a function that launches copies of page rows after each program and passes the copies to `on_layer`.

    Args:
      of_layers: for each layer with a cache, the numbers of the page rows to copy.
      on_layer: function that is called with the copies of each layer.
    """

    def on_program(layer_range: range, caches: Caches) -> None:
        if layer_range.start not in of_layers:  # the layers have no cache
            return
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
