"""Time of parts of a decode step: whole layers of each kind, and parts of a DeepSeek-V4 layer.

A part is a chain of calls of the model's own modules, with the weights and caches of the runner and the block tables of
a case (`Stopwatch.time`). The kernels of a chain run one after the other; in a step of the engine some overlap.

    layer KIND           one layer of this kind
    hyper-connections    both sites of a layer: weights of the streams, weighted sum, merged output
    experts              norm, router, routed experts and shared expert of a layer
    index and select     of a CSA layer: queries of the indexer, scores of all entries, selection, slots
    attention KIND       attention to the window and the selected or all entries, without projections and writes

Some weights of a part stay in the L2 cache between the calls of its chain: matrices of hyper-connections, and of the
indexer's queries. A step reads them from device memory.

The rest of a layer, which has no own chain, are projections, norms, rotations, compressors and cache writes. The rest
of a step are the embedding, the metadata, the head and the sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_attn import mla_sparse, token_slots
from pallas_attn.models.config import DeepseekV4Config, Gemma4Config
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HCA_KIND
from pallas_attn.models.decoder import Caches, Decoder, GroupTables, LayerCache, StepMetadata, split_module
from pallas_attn.models.decoder.hyper_connections import merge
from pallas_attn.models.engine.compile_options import GPU_OPTIONS
from scripts.bench.harness.timing import Chain, Stopwatch, compile_chains

LAYER, STREAMS, EXPERTS, SELECT, ATTENTION = (
    "layer",
    "hyper-connections",
    "experts",
    "index and select",
    "attention",
)
"""Names of parts; `LAYER` and `ATTENTION` are followed by the kind of the layer."""

LAYER_CALLS, PART_CALLS = 2, 6
"""Calls in a chain of layers, and of parts of layers."""

SHORT = {"sliding_attention": "window", "full_attention": "full", CSA_KIND: "CSA", HCA_KIND: "HCA"}
"""Short names of kinds of attention."""


class CachedRunner(Protocol):
    """Owner of the caches."""

    @property
    def caches(self) -> Caches: ...

    def replace_cache(self, layer: int, cache: LayerCache) -> None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class TimedPart:
    """A chain and its arguments.

    Attributes:
      chain: the chain.
      carried, shared, owns: its arguments.
      layer: layer whose cache is the second element of `carried`, which the chain updates; None for no cache.
    """

    chain: Chain
    carried: Any
    shared: Any
    owns: Sequence[Any]
    layer: int | None = None


class LayerParts:
    """Chains of the parts of a model, which are compiled once per batch and kind of layer.

    Attributes:
      config: configuration of the model.
    """

    def __init__(self, model: Decoder, page_size: int, stopwatch: Stopwatch):
        """Compile nothing."""
        if not isinstance(model.config, DeepseekV4Config | Gemma4Config):
            raise NotImplementedError(f"parts of a {model.config.model_type}: expected DeepSeek-V4 or Gemma 4")
        self.config = model.config
        self._model, self._page_size, self._stopwatch = model, page_size, stopwatch
        self._chains: dict[tuple[str, int], Chain] = {}
        rebuild, self._weights = split_module(model)
        self._begin = jax.jit(lambda weights, *arguments: rebuild(weights).begin(*arguments))
        self._of_kind = {self.config.layer_types[index]: index for index in self.config.cached_layers}

    def measure(
        self, runner: CachedRunner, context: int, tables: Sequence[Int32[np.ndarray, "B 1 P"]]
    ) -> dict[str, float]:
        """Return the seconds of each part, by name.

        Args:
          runner: has the caches. Some of their tokens are overwritten.
          context: tokens of each sequence, including the new token.
          tables: block tables of each cache group.
        """
        parts = self._parts(runner.caches, context, tables)
        compile_chains([(part.chain, part.carried, part.shared, part.owns) for part in parts.values()])
        seconds = {}
        for name, part in parts.items():
            timing, carried = self._stopwatch.time(part.chain, part.owns, carried=part.carried, shared=part.shared)
            seconds[name] = timing.median
            if part.layer is not None:  # the cache was donated
                runner.replace_cache(part.layer, carried[1])
        return seconds

    def _inputs(self, caches: Caches, context: int, tables: Sequence[Int32[np.ndarray, "B 1 P"]]) -> Any:
        """Return the inputs of the layers in a decode step whose tokens are at position context - 1: result of
        `Decoder.begin` without the embeddings."""
        batch, page = tables[0].shape[0], (context - 1) // self._page_size

        def group(table: Int32[np.ndarray, "B 1 P"]) -> GroupTables:
            slots = table[:, 0, page] * self._page_size + (context - 1) % self._page_size
            pages = jnp.asarray(table[:, 0])
            return GroupTables(jnp.asarray(slots), pages, pages[:0])

        metadata = StepMetadata(
            jnp.full((batch,), context - 1, jnp.int32),
            tuple(map(group, tables)),
            jnp.full((batch,), context, jnp.int32),
            jnp.zeros((1,), jnp.int32),
            jnp.zeros((0,), jnp.int32),
            jnp.arange(batch, dtype=jnp.int32),
        )
        tokens = jax.random.randint(jax.random.key(batch), (batch,), 0, self.config.vocab_size, jnp.int32)
        return self._begin(self._weights, tokens, caches[0], metadata)[1:]

    def _parts(
        self, caches: Caches, context: int, tables: Sequence[Int32[np.ndarray, "B 1 P"]]
    ) -> dict[str, TimedPart]:
        """Return all parts. Layers come last, because their chains are given the caches that other parts read."""
        inputs, groups = self._inputs(caches, context, tables)
        batch, numbers = tables[0].shape[0], self._model.layer_groups
        parts, layers = dict[str, TimedPart](), dict[str, TimedPart]()
        for kind, index in self._of_kind.items():
            slots, step = groups[numbers[index]]
            of_layer = inputs.of_layer(index) if isinstance(self.config, Gemma4Config) else inputs
            name = f"{LAYER} {SHORT[kind]}"
            layers[name] = self._layer(name, index, caches[index], batch, (of_layer, slots, step))
            if kind == CSA_KIND:
                parts |= self._sublayers(index, caches[index], batch, inputs, slots, step)
            if kind in (CSA_KIND, HCA_KIND):
                name, seen = f"{ATTENTION} {SHORT[kind]}", (step.window_range or step.window, step.entries)
                if kind == CSA_KIND:
                    seen = step.window, self._random_entries(index, batch, context, step)
                parts[name] = self._attention(name, index, caches[index], batch, *seen)
        return parts | layers

    def _chain(self, name: str, batch: int, call: Callable[..., Any]) -> Chain:
        """Return the chain of a part for a batch. The call of the first request is compiled."""
        return self._chains.setdefault((name, batch), Chain(call, GPU_OPTIONS))

    def _random(self, batch: int, *shape: int, count: int = PART_CALLS) -> list[Array]:
        dtype = self._model.embed_tokens.dtype
        keys = jax.random.split(jax.random.key(batch), count)
        return [jax.random.normal(key, (batch, *shape), jnp.float32).astype(dtype) for key in keys]

    @property
    def _width(self) -> tuple[int, ...]:
        """Shape of the hidden states of a token between layers."""
        streams = (self.config.hc_mult,) if isinstance(self.config, DeepseekV4Config) else ()
        return (*streams, self.config.hidden_size)

    def _layer(self, name: str, index: int, cache: LayerCache, batch: int, arguments: tuple[Any, ...]) -> TimedPart:
        rebuild, weights = split_module(self._model.layers[index])

        def call(carried: Any, shared: Any, _: None) -> tuple[Any, None]:
            (x, cache), (weights, (inputs, slots, step)) = carried, shared
            x, cache, _ = rebuild(weights)(x, inputs, cache, slots, step)
            return (x, cache), None

        (x,) = self._random(batch, *self._width, count=1)
        return TimedPart(self._chain(name, batch, call), (x, cache), (weights, arguments), [None] * LAYER_CALLS, index)

    def _sublayers(
        self, index: int, cache: Any, batch: int, inputs: Any, slots: Int32[Array, "B"], step: Any
    ) -> dict[str, TimedPart]:
        """Return the hyper-connections, the experts and the indexer of a CSA layer."""
        config: Any = self.config
        rebuild, weights = split_module(self._model.layers[index])
        hidden, (streams,) = config.hidden_size, self._random(batch, *self._width, count=1)

        def connect(streams: Any, weights: Any, _: None) -> tuple[Any, None]:
            module: Any = rebuild(weights)
            for site in (module.hc_attn, module.hc_ffn):
                x, of_streams = site(streams)
                streams = merge(streams, x, of_streams)
            return streams, None

        def experts(_: None, shared: Any, x: Any) -> tuple[None, Any]:
            weights, tokens, slots = shared
            module: Any = rebuild(weights)
            return None, module.ffn(module.ffn_norm(x), tokens, slots >= 0)

        def select(_: None, shared: Any, own: Any) -> tuple[None, Any]:
            weights, inputs, index_keys, step = shared
            module: Any = rebuild(weights)
            tables = step.tables[module.attn.groups[1]]
            return None, module.attn.indexer(*own, inputs, index_keys, tables, step, module.attn.settings)

        pairs = list(zip(self._random(batch, hidden), self._random(batch, config.q_lora_rank), strict=True))
        of_experts, of_select = (weights, inputs.tokens, slots), (weights, inputs, cache.index, step)
        return {
            STREAMS: TimedPart(self._chain(STREAMS, batch, connect), streams, weights, [None] * PART_CALLS),
            EXPERTS: TimedPart(self._chain(EXPERTS, batch, experts), None, of_experts, self._random(batch, hidden)),
            SELECT: TimedPart(self._chain(SELECT, batch, select), None, of_select, pairs),
        }

    def _attention(self, name: str, index: int, cache: Any, batch: int, window: Any, chosen: Any) -> TimedPart:
        config: Any = self.config
        settings, layer = self._model.settings, self._model.layers[index]

        def attend(_: None, shared: Any, q: Any) -> tuple[None, Any]:
            sinks, keys, slots, entries, chosen = shared
            extra = {"extra_cache": entries, "extra_slots": chosen}
            scale, implementation = config.sm_scale, settings.implementation
            out = mla_sparse(q, None, keys, slots, sm_scale=scale, sinks=sinks, **extra, implementation=implementation)
            return None, out

        shared = (layer.attn.sinks[...], cache.window, window, cache.entries, chosen)
        queries = self._random(batch, config.num_attention_heads, config.head_dim)
        return TimedPart(self._chain(name, batch, attend), None, shared, queries)

    def _random_entries(self, index: int, batch: int, context: int, step: Any) -> Array:
        """Return the slots of random entries that tokens of a CSA layer attend to, int32 [B, K]; -1 for no entry."""
        config: Any = self.config
        rng, count = np.random.default_rng(context), self._model.settings.index_topk or config.index_topk
        entries = context // config.csa_rate
        chosen = np.full((batch, count), -1, np.int32)
        for row in chosen:
            taken = rng.choice(entries, min(count, entries), replace=False)
            row[: len(taken)] = np.sort(taken)
        tables = step.tables[config.groups_of(index)[1]]
        return token_slots(jnp.asarray(chosen), tables, step.cu_q_lens, page_size=self._page_size // config.csa_rate)


def shares(
    config: DeepseekV4Config | Gemma4Config,
    whole: DeepseekV4Config | Gemma4Config,
    seconds: Mapping[str, float],
    step_s: float,
) -> dict[str, Any]:
    """Return shares of a step and of layers, and an estimate for the whole model.

    Args:
      config: configuration of the measured model.
      whole: configuration of the whole model.
      seconds: seconds of each part.
      step_s: seconds of a decode step of the measured model.
    """

    def layers_s(of: DeepseekV4Config | Gemma4Config) -> float:
        return sum(seconds[f"{LAYER} {SHORT[kind]}"] for kind in of.layer_types)

    rest_s = max(step_s - layers_s(config), 0.0)
    result: dict[str, Any] = {
        "layers_s": layers_s(config),
        "rest_s": rest_s,
        "whole_model_step_s": layers_s(whole) + rest_s,
    }
    if STREAMS not in seconds:
        return result
    names = [name for name in seconds if name.startswith(LAYER)]
    of_csa = f"{LAYER} {SHORT[CSA_KIND]}"
    return result | {
        "hyper_connections_of_step": seconds[STREAMS] * config.num_hidden_layers / step_s,
        "hyper_connections_of_layer": {name: seconds[STREAMS] / seconds[name] for name in names},
        "index_and_select_of_layer": seconds[SELECT] / seconds[of_csa],
        "attention_of_layer": {
            name: seconds[part] / seconds[name] for name in names if (part := name.replace(LAYER, ATTENTION)) in seconds
        },
        "experts_of_layer": {name: seconds[EXPERTS] / seconds[name] for name in names},
    }


def line(case: Mapping[str, Any]) -> str:
    """Format the parts of a case as one line."""
    times = ", ".join(f"{name} {microseconds:,.0f} us" for name, microseconds in case["parts_us"].items())
    whole = f"whole model {1e3 * case['whole_model_step_s']:.2f} ms a step"
    if "hyper_connections_of_step" not in case:
        return f"{times}; {whole}"
    return (
        f"{times}; hyper-connections {case['hyper_connections_of_step']:.0%} of the step, index and select"
        f" {case['index_and_select_of_layer']:.0%} of a CSA layer; {whole}"
    )
